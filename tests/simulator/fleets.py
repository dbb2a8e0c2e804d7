"""Engines whose step times are known in closed form."""

from __future__ import annotations

import numpy as np

from planner.perf.allreduce import AllReduce
from planner.perf.model import PerformanceModel
from planner.perf.tables import LayerRow
from planner.types import Phase
from simulator.fleet import Engine, EngineStage, Lane
from simulator.tables import GroupKind
from simulator.trace import Trace
from tests.builders import MODEL, node_class

TINY_MS = 1e-9  # tables hold no zeros


def performance(step_ms: float, per_token_ms: float = 0.0, gpu: str = "L4") -> PerformanceModel:
    """Every step takes `step_ms` and `per_token_ms` per new token, per layer."""
    rows = []
    for batch in (1, 1024):
        for context in (0, 65536):
            linear = step_ms + per_token_ms * batch
            rows.append(LayerRow("decode", batch, batch, context, linear, TINY_MS, TINY_MS, "test"))
    for tokens in (1, 65536):
        linear = step_ms + per_token_ms * tokens
        rows.append(LayerRow("prefill", 1, tokens, 0, linear, TINY_MS, TINY_MS, "test"))
    key = (MODEL.name, "bf16", f"{gpu}-profile", 1)
    return PerformanceModel({key: rows}, {}, AllReduce({}, {}), {})


def lane(kv_blocks: int = 10_000, weight: float = 1.0) -> Lane:
    return Lane(GroupKind(MODEL, "bf16", node_class("L4"), 1), 0.0, kv_blocks, weight)


def engine(
    name: str = "one",
    phase: Phase = Phase.AGGREGATED,
    layers: tuple[int, ...] = (1,),
    lanes: tuple[Lane, ...] | None = None,
    micro_batches: int = 1,
    step_requests: int = 8,
    most_requests: int = 8,
    token_budget: int = 4096,
    weight: float = 1.0,
    hop_latency_ms: float = 0.0,
    kv_ms_per_token: float = 0.0,
) -> Engine:
    stages = tuple(
        EngineStage(count, k == len(layers) - 1, lanes or (lane(),))
        for k, count in enumerate(layers)
    )
    return Engine(
        name, phase, "here", {"chat": weight}, stages, micro_batches, step_requests,
        most_requests, token_budget, hop_latency_ms, 0.0, kv_ms_per_token,
    )  # fmt: skip


def trace(
    arrival_s: np.ndarray, input_tokens: int | np.ndarray, output_tokens: int | np.ndarray
) -> Trace:
    whole = np.ones(arrival_s.size, dtype=np.int64)
    return Trace(("chat",), arrival_s, whole * 0, whole * input_tokens, whole * output_tokens)

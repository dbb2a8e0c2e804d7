"""Helix's layouts as engines of Coral's simulator, one pipeline each.

Assumed: as many micro-batches in flight as stages, each of equal size; a step with prompts and
decodes takes the sum of both, since Helix's workers run them in steps of their own; a stage with
several machines moves on when its slowest is done.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from bench.helix_data import (
    LINK_BYTES_PER_MS,
    LINK_LATENCY_MS,
    LONGEST_INPUT,
    Run,
    drawn,
    layer_times,
    layout,
    lengths,
    machine_limits,
)
from bench.helix_machines import Served
from bench.peer_data import MODELS
from planner.perf.allreduce import AllReduce
from planner.perf.model import PerformanceModel
from planner.perf.tables import LayerRow
from planner.types import GpuSpec, Link, ModelSpec, NodeClass, Phase
from simulator.fleet import Engine, EngineStage, Lane
from simulator.kernels.types import BLOCK_TOKENS
from simulator.run import Result, simulate
from simulator.tables import GroupKind
from simulator.trace import Trace

KV_SHARE = 0.8  # of the tightest machine's, filled where no number in flight is given
PROMPTS_PER_STEP = 1
OFFLINE_ROUNDS = 30  # requests queued, per place
TINY_MS = 1e-9  # tables hold no zeros


def is_pipeline(run: Run) -> bool:
    """Whether its machines hold ranges of layers that are equal or apart."""
    ranges = sorted({(first, end) for _, _, first, end in layout(run)})
    return all(one[1] == other[0] for one, other in itertools.pairwise(ranges))


def engine_tokens_per_s(
    run: Run, performance: PerformanceModel, overhead_ms: Mapping[str, float], seeds: int
) -> float:
    """Output tokens/s of the run's window, mean over seeds where requests come at random."""
    engine = pipeline(run, overhead_ms)
    found = []
    for seed in range(seeds if run.is_online else 1):
        arrival_s, inputs, outputs = drawn(run, seed, OFFLINE_ROUNDS * engine.most_requests)
        place = np.zeros(arrival_s.size, dtype=np.int64)
        trace = Trace(("w",), arrival_s, place, inputs, outputs)
        result = simulate([engine], trace, performance)
        found.append(tokens_between(result, run.from_s, run.until_s))
    return float(np.mean(found))


def tokens_between(result: Result, from_s: float, until_s: float) -> float:
    """Output tokens/s of requests that ended; spread evenly between their ends."""
    first_ms = np.where(result.finish_ms < 0.0, -1.0, result.first_ms)
    served = Served(result.start_ms, first_ms, result.finish_ms, result.trace.output_tokens)
    return served.within(1e3 * from_s, 1e3 * until_s)[0]


def pipeline(run: Run, overhead_ms: Mapping[str, float]) -> Engine:
    """The layout as one engine: a stage per layer range, a lane per machine."""
    machines = layout(run)
    ranges = sorted({(first, end) for _, _, first, end in machines})
    stages = [
        (end - first, [machine for _, machine, start, _ in machines if start == first])
        for first, end in ranges
    ]
    return stages_engine(run.layout, run.model, stages, run.in_flight, overhead_ms)


def stages_engine(
    name: str,
    model: str,
    stages: Sequence[tuple[int, Sequence[str]]],
    in_flight: int | None,
    overhead_ms: Mapping[str, float],
) -> Engine:
    """Stages of (layers, machines); without `in_flight` as many requests as 80% of the KV holds."""
    limits, (inputs, outputs) = machine_limits(model), lengths()
    built, room = [], []
    for place, (layers, machines) in enumerate(stages):
        tokens = [limits[machine, layers].kv_tokens for machine in machines]
        room.append(sum(tokens))
        lanes = tuple(
            Lane(
                _kind(model, machine),
                overhead_ms.get(machine, 0.0),
                held // BLOCK_TOKENS,
                _speed(model, machine),
            )
            for machine, held in zip(machines, tokens, strict=True)
        )
        built.append(EngineStage(layers, place == len(stages) - 1, lanes))
    # Outputs of requests in flight at some moment: longer ones are met more often.
    output = float((outputs.astype(float) ** 2).sum() / outputs.sum())
    requests = in_flight or int(KV_SHARE * min(room) / (float(inputs.mean()) + output))
    batch = -(-requests // len(stages))
    return Engine(
        name=name,
        phase=Phase.AGGREGATED,
        domain="here",
        weights={"w": 1.0},
        stages=tuple(built),
        micro_batches=len(stages),
        step_requests=batch,
        most_requests=requests,
        token_budget=batch + PROMPTS_PER_STEP * LONGEST_INPUT,
        hop_latency_ms=LINK_LATENCY_MS,
        hop_ms_per_token=MODELS[model][1] / LINK_BYTES_PER_MS,
    )


def helix_performance() -> PerformanceModel:
    """Helix's times of one layer as tables of one GPU each."""
    rows: dict[tuple[str, str, str, int], list[LayerRow]] = {}
    for model in MODELS:
        for (machine, prompts), (sizes, times) in layer_times(model).items():
            mine = rows.setdefault((model, "fp16", machine, 1), [])
            for tokens, ms in zip(sizes.astype(int).tolist(), times.tolist(), strict=True):
                if tokens == 0:
                    continue
                if prompts:
                    row = LayerRow("prefill", 1, tokens, 0, ms, TINY_MS, TINY_MS, "Helix")
                    mine.append(row)
                    continue
                for context in (0, 4096):  # no dependence on it was measured
                    row = LayerRow("decode", tokens, tokens, context, TINY_MS, ms, TINY_MS, "Helix")
                    mine.append(row)
    return PerformanceModel(rows, {}, AllReduce({}, {}), {})


def _speed(model: str, machine: str) -> float:
    """Share of a stage's requests: by the time of a prompt of 750 tokens, as swarm's router."""
    tokens, ms = layer_times(model)[machine, True]
    return 1.0 / float(np.interp(750.0, tokens, ms))


def _kind(model: str, machine: str) -> GroupKind:
    layers, activation = MODELS[model]
    spec = ModelSpec(
        name=model, dtype="fp16", layers=layers, hidden=round(activation / 2), heads=1, kv_heads=1,
        head_dim=1, intermediate=1, experts=0, experts_per_token=0, moe_intermediate=0, vocab=1,
        weight_bytes=2.0, expert_weight_bytes=0.0, bytes_per_layer=1, embed_bytes=0,
        lm_head_bytes=0, kv_bytes_per_token_per_layer=4, hop_bytes_per_token=round(activation),
    )  # fmt: skip
    gpu = GpuSpec(machine, machine, 16.0, 300.0, 100.0, 70.0, 8.0)
    return GroupKind(spec, "fp16", NodeClass(f"{machine} x1", gpu, 1, Link.NONE, 8.0, 8.0), 1)

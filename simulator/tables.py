"""Step times of tensor parallel groups, evaluated once from the performance model.

Source: docs/formulation.md, sections 1 and 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.perf.grids import Floats
from planner.perf.model import PerformanceModel
from planner.types import ModelSpec, NodeClass
from simulator.errors import SimulationError
from simulator.kernels.types import Tables

CONTEXT_STEPS = 256  # points over context; between them decode times are linear
REQUESTS_AT_LEAST = 8


@dataclass(frozen=True, slots=True)
class GroupKind:
    """Tensor parallel groups that step alike."""

    model: ModelSpec
    dtype: str
    node: NodeClass
    tensor_parallel_size: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        return (self.model.name, self.dtype, self.node.name, self.tensor_parallel_size)


@dataclass(frozen=True, slots=True)
class TableSizes:
    """Largest work of one step that the tables must answer."""

    requests: int
    tokens: int  # new ones of one step
    context: int  # tokens of one request


def build_tables(
    performance: PerformanceModel, kinds: Sequence[GroupKind], sizes: TableSizes
) -> Tables:
    """One table per kind, in order.

    Raises SimulationError: a time is beyond what the performance model answers.
    """
    step = sizes.context / CONTEXT_STEPS
    parts = [_table(performance, kind, sizes, step) for kind in kinds]
    mixed, prefill, prompt, decode, attention, head = (
        np.stack(arrays) for arrays in zip(*parts, strict=True)
    )
    return Tables(mixed, prefill, prompt, decode, attention, head, step)


def _table(
    performance: PerformanceModel, kind: GroupKind, sizes: TableSizes, step: float
) -> tuple[Floats, ...]:
    model, tp = kind.model, kind.tensor_parallel_size
    times = performance.layer_times(model, kind.dtype, kind.node.gpu, tp)
    tokens = np.arange(1.0, max(sizes.tokens, sizes.requests) + sizes.requests + 1.0)
    comm = performance.comm_ms(model, kind.node, tp, tokens)
    requests = np.arange(1.0, sizes.requests + 1.0)
    batch, context = np.meshgrid(requests, np.arange(CONTEXT_STEPS + 2) * step, indexing="ij")
    context = np.minimum(context, sizes.context)
    lengths = np.arange(1.0, sizes.context + 1.0)
    found = (
        times.mixed_linear_ms(tokens) + comm,
        times.prefill_linear_ms(tokens) + comm,
        times.prefill_attention_ms(lengths, np.zeros(lengths.shape)),
        times.decode_layer_ms(batch, context) + comm[: requests.size, None],
        times.decode_attention_ms(batch, context),
        times.head_ms(requests),
    )
    if not all(np.isfinite(array).all() for array in found):
        raise SimulationError(
            f"{model.name} on {kind.node.name} as TP{tp}: nobody measured steps of "
            f"{sizes.requests} requests, {sizes.tokens} new tokens or {sizes.context} tokens of "
            "context; shorten the requests of the trace"
        )
    return tuple(np.concatenate([np.zeros((1, *a.shape[1:])), a]) for a in found)

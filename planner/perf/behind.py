"""Which row of the performance tables a step time rests on, in words that find it again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.perf.model import PerformanceModel
from planner.perf.roofline import Roofline
from planner.perf.tables import LayerRow
from planner.types import ModelSpec, NodeClass


@dataclass(frozen=True, slots=True)
class Step:
    """What one tensor parallel group does in one step."""

    decodes: float  # sequences
    prompt_tokens: float  # new ones of longer prompts
    context: float  # cached tokens of each sequence
    prompts_weigh: bool  # whether the prompts take more of the step than the decodes


def row_behind(
    performance: PerformanceModel,
    model: ModelSpec,
    dtype: str,
    node: NodeClass,
    tensor_parallel_size: int,
    step: Step,
) -> str:
    """The measured row nearest to the step, or the calibration in place of one.

    Raises MissingProfileError: there is neither.
    """
    times = performance.layer_times(model, dtype, node.gpu, tensor_parallel_size)
    gpu = node.gpu.profile_name
    if isinstance(times, Roofline):
        found = times.calibration
        kind = "moe" if model.is_moe else "dense"
        return (
            f"calibration: {gpu}, {kind}, {dtype} ({found.provenance.value}: {found.source}); "
            f"{model.name} has no measured table on {gpu} at TP{tensor_parallel_size}"
        )
    rows = performance.rows[model.name, dtype, gpu, tensor_parallel_size]
    phase = "prefill" if step.prompts_weigh else "decode"
    row = min((row for row in rows if row.phase == phase), key=lambda row: _distance(row, step))
    return (
        f"layer_profile: {model.name} {dtype} on {gpu} TP{tensor_parallel_size}, {row.phase}, "
        f"batch {row.batch}, {row.tokens} tokens, context {row.context}: "
        f"{row.linear_ms + row.attention_ms:.4g} ms ({row.source})"
    )


def _distance(row: LayerRow, step: Step) -> tuple[float, float]:
    def apart(a: float, b: float) -> float:
        return abs(math.log(max(a, 1.0) / max(b, 1.0)))

    if step.prompts_weigh:
        return (row.batch - 1.0 + apart(row.tokens, step.prompt_tokens), float(row.context))
    return (apart(row.batch, step.decodes) + apart(row.context, step.context), float(row.batch))

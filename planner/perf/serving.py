"""What a closed loop of requests sees: TPOT and throughput from step times.

`B` requests are in flight, each with a prompt of p tokens and o of output; as one ends the next
comes, and joins one step later. Prompts are taken whole, so a slot has a period of o + 1 steps, and
`B / (o + 1)` prompts come on average to a step. With D the step of the decodes and M one with a
prompt too,

    step = D + r (M - D),  r = B / (o + 1)           throughput = B / ((o + 1) step)
    TPOT = D + r' (M - D),  r' = (B - 1) / (o + 1)   (its own prompt's step is none of its gaps)

For more than one prompt per step, M has r prompts and every step is one. A request alone has
a period of o steps.
Source: docs/formulation.md, section 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.perf.model import PerformanceModel, StepTimes
from planner.types import ModelSpec, NodeClass


@dataclass(frozen=True, slots=True)
class Loop:
    """A closed loop of equal requests."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """What it comes to."""

    tpot_ms: float
    throughput_rps: float
    layer_share: float  # of a step's time


def loop_figures(
    performance: PerformanceModel,
    model: ModelSpec,
    node: NodeClass,
    tp: int,
    loop: Loop,
    overhead_ms: float,
) -> LoopFigures:
    """Predict a closed loop on one engine with all layers of the model."""

    def milliseconds(step: StepTimes) -> float:
        return float(model.layers * step.layer_ms[0] + step.head_ms[0]) + overhead_ms

    b, p, o = float(loop.concurrency), float(loop.prompt_tokens), float(loop.output_tokens)
    period = o + 1.0 if b > 1.0 else o  # alone, nothing steps between two requests
    in_flight = np.array([max(1.0, b * o / period)])
    context = np.array([p + o / 2.0])
    dtype = model.dtype
    alone = performance.decode_step(model, dtype, node, tp, in_flight, context)
    prompts = max(1.0, b / period)  # of a step that carries any
    if b > 1.0:
        others = np.maximum(in_flight - prompts, 1.0)
        new = np.array([prompts * p])
        step = performance.mixed_step(model, dtype, node, tp, others, context, new, p)
    else:
        step = performance.prefill_step(model, dtype, node, tp, np.array([1.0]), p)
    decode_ms, mixed_ms = milliseconds(alone), milliseconds(step)
    share = min(1.0, b / period)
    mean_ms = decode_ms + share * (mixed_ms - decode_ms)
    met = share * (1.0 - 1.0 / b)
    return LoopFigures(
        tpot_ms=decode_ms + met * (mixed_ms - decode_ms),
        throughput_rps=1e3 * b / (period * mean_ms),
        layer_share=float(model.layers * alone.layer_ms[0]) / decode_ms,
    )

"""What a client of the planned replicas should see: tokens/s, TTFT and TPOT when all are full.

Source: docs/formulation.md, section 3; docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.types import Lengths, Phase, Template


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    """Of one model's replicas together, with as many requests in flight as they take."""

    in_flight: int  # requests, M b of every replica that answers
    requests_per_s: float  # before the utilisation cap
    output_tokens_per_s: float
    ttft_ms: float  # of a prompt of mean length; no queue
    tpot_ms: float


def service_figures(templates: Sequence[Template], lengths: Lengths) -> ServiceFigures:
    """Of replicas, one template each, that serve one workload.

    An aggregated replica works a mean prompt off in `o / s` cycles, where s is its group's share of
    the micro-batch. A pair's first token takes a prefill and a decode step. Means are weighted by
    what each replica serves.
    """
    answering = [t for t in templates if t.phase is not Phase.PREFILL]
    prefill = [t for t in templates if t.phase is Phase.PREFILL]
    total = sum(t.placement.raw_rps for t in answering)
    before = _mean_ms(prefill)
    weights = [t.placement.raw_rps / total for t in answering]
    firsts = [
        t.placement.cycle_ms * _chunks(t, lengths)
        if t.phase is Phase.AGGREGATED
        else before + t.placement.cycle_ms
        for t in answering
    ]
    return ServiceFigures(
        in_flight=sum(t.placement.micro_batches * t.placement.micro_batch_size for t in answering),
        requests_per_s=total,
        output_tokens_per_s=total * lengths.mean_output,
        ttft_ms=sum(w * ms for w, ms in zip(weights, firsts, strict=True)),
        tpot_ms=sum(w * t.placement.cycle_ms for w, t in zip(weights, answering, strict=True)),
    )


def _chunks(template: Template, lengths: Lengths) -> int:
    """Cycles that a mean prompt takes."""
    groups = template.placement.stages[0].nodes[0].data_parallel_size
    share = math.ceil(template.placement.micro_batch_size / groups)
    return math.ceil(lengths.mean_output / share)


def _mean_ms(prefill: Sequence[Template]) -> float:
    total = sum(t.placement.raw_rps for t in prefill)
    return sum(t.placement.raw_rps / total * t.placement.latency_ms for t in prefill)

"""What replicas do beside what their templates promise, and what the plan makes of it.

Source: docs/formulation.md, section 12.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.expected import Bench, Expected
from planner.perf.grids import Floats
from planner.placement.loads import Flags, at_load
from planner.placement.profile import PhaseProblem
from planner.types import Phase, Template, Workload

LEAST_MINUTES = 10  # of one kind, for a speed
LEAST_LOAD = 0.25  # of a replica's places
LEAST_TOKENS = 30  # timed in a minute
FULL = 0.95  # of a replica's places: it is near saturation
LEAST_FACTOR, MOST_FACTOR = 0.7, 1.3
STEP = 0.05  # a factor that moves by less stays: so exact is what is expected
DRIFT = 0.15  # of a speed, beyond which the profile is called wrong
LOADS = 64  # parts of a full micro-batch that are tried


@dataclass(frozen=True)
class Minutes:
    """Minutes of one template's replicas; arrays of shape (n,)."""

    in_flight: Floats  # mean requests at the replica
    decoding: Floats  # mean requests that decode
    among: Floats  # requests that one decodes among
    tpot_ms: Floats  # nan where nothing was timed
    timed_tokens: Floats
    requests_per_s: Floats  # that ended
    tokens_per_s: Floats  # of output
    prompt_tokens: float  # mean over all requests that ended
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one template: 0.8 is a fifth slower than its profile."""

    speed: float
    kind: str  # 'throughput' or 'tpot'
    minutes: int  # behind it
    among: float  # requests that one decodes (prefill: is) among, the median of these minutes
    observed: float  # of the kind: tokens/s (prefill: prompts/s) or ms, medians
    predicted: float
    row: str  # of the performance tables, at that load

    @property
    def has_drifted(self) -> bool:
        return abs(self.speed - 1.0) > DRIFT


def speed_of(bench: Bench, template: Template, workload: Workload, seen: Minutes) -> Speed | None:
    """How fast the template's replicas were; None: too few minutes under load.

    Raises MissingProfileError: its tables are gone.
    """
    placement = template.placement
    places = placement.micro_batches * placement.micro_batch_size
    expected = Expected.of(bench, template, workload, seen.prompt_tokens, seen.output_tokens)
    busy = seen.in_flight if template.phase is Phase.PREFILL else seen.decoding
    made = seen.requests_per_s if template.phase is Phase.PREFILL else seen.tokens_per_s
    full = (busy >= FULL * places) & (made > 0.0)
    if full.sum() >= LEAST_MINUTES:
        rate = expected.rate(busy)
        return _speed(expected, "throughput", full, busy, made, rate, made / rate)
    if template.phase is Phase.PREFILL:
        return None
    timed = (seen.among >= LEAST_LOAD * places) & (seen.timed_tokens >= LEAST_TOKENS)
    if timed.sum() < LEAST_MINUTES:
        return None
    tpot = expected.tpot_ms(seen.among)
    return _speed(expected, "tpot", timed, seen.among, seen.tpot_ms, tpot, tpot / seen.tpot_ms)


def factor_of(template: Template, problem: PhaseProblem, speed: float) -> float:
    """By what the template's throughput is to be multiplied; `problem` is its own.

    Slower steps leave room for fewer requests within TPOT.
    """
    gain = speed
    if template.phase.in_cycles:
        share = np.arange(1.0, LOADS + 1.0) / LOADS
        times = at_load(problem, template.combination, template.placement, share)
        cycle = times.cycle_ms(template.placement.micro_batches)
        limit = max(problem.terms.budget_ms, float(cycle[-1]))  # P5 holds at speed 1
        fits = cycle <= speed * limit * (1.0 + 1e-9)
        rates = np.where(fits, share / cycle, 0.0)
        gain = speed * float(rates.max() * cycle[-1])
    return min(MOST_FACTOR, max(LEAST_FACTOR, gain))


def settled(factor: float, in_force: float) -> float:
    """The next factor: as before where it hardly moved; 1 where it is hardly any."""
    if abs(factor / in_force - 1.0) <= STEP:
        return in_force
    return 1.0 if abs(factor - 1.0) <= STEP else factor


def with_corrections(templates: Iterable[Template], factors: Mapping[str, float]) -> list[Template]:
    """Templates with what serving taught of them, by id."""
    return [
        _corrected(template, factors[template.id]) if template.id in factors else template
        for template in templates
    ]


def _corrected(template: Template, factor: float) -> Template:
    return replace(
        template,
        throughput_rps=template.throughput_rps * factor,
        shared_rps={name: rps * factor for name, rps in template.shared_rps.items()},
    )


def _speed(
    expected: Expected,
    kind: str,
    chosen: Flags,
    requests: Floats,
    observed: Floats,
    predicted: Floats,
    speed: Floats,
) -> Speed:
    among = float(np.median(requests[chosen]))
    return Speed(
        float(np.median(speed[chosen])), kind, int(chosen.sum()), among,
        float(np.median(observed[chosen])), float(np.median(predicted[chosen])),
        expected.row(among),
    )  # fmt: skip

"""What replicas do beside what their templates promise, and what the plan makes of it.

Source: docs/formulation.md, section 12.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.engine import SPARE_PLACES, engines_side_by_side
from planner.perf.behind import Step, row_behind
from planner.perf.grids import Floats
from planner.perf.model import PerformanceModel
from planner.placement.loads import Flags, LoadTimes, at_load, group_of
from planner.placement.profile import PhaseProblem, build_phase_problem
from planner.placement.settings import PlacementSettings
from planner.types import Lengths, NodeClass, Phase, Template, Workload

LEAST_MINUTES = 10  # of one kind, for a speed
LEAST_LOAD = 0.25  # of a replica's places
LEAST_TOKENS = 30  # timed in a minute
FULL = 0.95  # of a replica's places: it is near saturation
LEAST_FACTOR, MOST_FACTOR = 0.7, 1.3
STEP = 0.03  # a factor that moves by less stays
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


@dataclass(frozen=True)
class Bench:
    """What every prediction of a scenario needs."""

    performance: PerformanceModel
    nodes: Mapping[str, NodeClass]  # by name
    settings: PlacementSettings


def speed_of(bench: Bench, template: Template, workload: Workload, seen: Minutes) -> Speed | None:
    """How fast the template's replicas were; None: too few minutes under load.

    Raises MissingProfileError: its tables are gone.
    """
    placement = template.placement
    places = placement.micro_batches * placement.micro_batch_size
    expected = Expected.of(bench, template, workload, seen)
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


@dataclass(frozen=True)
class Expected:
    """One template at the lengths that were seen."""

    bench: Bench
    template: Template
    workload: Workload  # with these lengths
    problem: PhaseProblem
    decodes: PhaseProblem  # the same without prompts

    @classmethod
    def of(cls, bench: Bench, template: Template, workload: Workload, seen: Minutes) -> Expected:
        p, o = max(1.0, seen.prompt_tokens), max(1.0, seen.output_tokens)
        met = replace(workload, lengths=Lengths("observed", p, o, p, o))
        nodes = [bench.nodes[name] for name, _ in template.combination]

        def problem(phase: Phase) -> PhaseProblem:
            return build_phase_problem(met, phase, nodes, bench.performance, bench.settings)

        decodes = problem(Phase.DECODE)
        alone = replace(decodes.terms, prompt_kv_bytes_per_layer=0.0)
        return cls(bench, template, met, problem(template.phase), replace(decodes, terms=alone))

    def tpot_ms(self, requests: Floats) -> Floats:
        """Of one among so many that decode."""
        times, count = self._times(self.problem, requests)
        cycle = times.cycle_ms(count)
        if self.template.phase is not Phase.AGGREGATED:
            return cycle
        alone = np.minimum(cycle, self._times(self.decodes, requests)[0].cycle_ms(count))
        engines = engines_side_by_side(self.template.placement)
        return cycle - (cycle - alone) / np.maximum(1.0, requests / engines)

    def rate(self, requests: Floats) -> Floats:
        """Tokens/s of so many that decode; prefill: prompts/s of a full replica."""
        times, count = self._times(self.problem, requests)
        if self.template.phase is Phase.PREFILL:
            return 1e3 * self.template.placement.micro_batch_size / times.slowest_ms
        return 1e3 * self._held(requests) / times.cycle_ms(count)

    def row(self, requests: float) -> str:
        """Of the performance tables: behind the stage that takes most of a cycle."""
        stages = self.template.placement.stages
        load, lengths = np.array([requests]), self.workload.lengths
        times, count = self._times(self.problem, load)
        number = int(np.argmax([stage.step_ms[0] for stage in times.stages]))
        node = max(stages[number].nodes, key=lambda node: node.batch)
        size = float((self._held(load) / count)[0] / self.template.placement.micro_batch_size)
        group = max(1.0, group_of(node) * size)
        match self.template.phase:
            case Phase.PREFILL:
                prompts, weigh = group * lengths.mean_input, True
            case Phase.AGGREGATED:
                prompts = group * self.problem.terms.chunk_tokens
                alone = self._times(self.decodes, load)[0].stages[number].step_ms[0]
                weigh = bool(alone < 0.5 * times.stages[number].step_ms[0])
            case Phase.DECODE:
                prompts, weigh = 0.0, False
        step = Step(group, prompts, lengths.mean_input + lengths.mean_output / 2.0, weigh)
        return row_behind(
            self.bench.performance, self.workload.model, self.workload.dtype,
            self.bench.nodes[node.node_class], node.tensor_parallel_size, step,
        )  # fmt: skip

    def _times(self, problem: PhaseProblem, requests: Floats) -> tuple[LoadTimes, Floats]:
        """Of the stages, with so many micro-batches under way."""
        placement = self.template.placement
        held = self._held(requests)
        count = np.minimum(float(placement.micro_batches), held)
        share = held / count / placement.micro_batch_size
        return at_load(problem, self.template.combination, placement, share), count

    def _held(self, requests: Floats) -> Floats:
        """Those that have a place: at least one, and what the engines take at most."""
        placement = self.template.placement
        places = placement.micro_batches * placement.micro_batch_size
        spare = SPARE_PLACES if self.template.phase is Phase.AGGREGATED else 1.0
        return np.clip(requests, 1.0, spare * places)


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

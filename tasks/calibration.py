"""Utilisation caps by simulation: plans that attain the objectives at the least cost.

Source: docs/formulation.md, section 10, Calibration of the caps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from prefect import task
from prefect.cache_policies import NO_CACHE

from catalog import simulations
from catalog.store import Catalog
from planner.allocation.plan import Plan
from planner.allocation.solve import plan_allocation
from planner.caps import Caps, with_caps
from planner.types import Phase
from simulator.phases import phase_attainment
from tasks import progress
from tasks.allocation import allocation_input, read_library
from tasks.fleet_engines import fleet_of_plan
from tasks.inputs import Inputs
from tasks.requests import History, Load
from tasks.simulation import WARM_UP_SHARE, Simulation, read_histories, simulate_fleet

Key = tuple[str, Phase]
LEAST_LOAD, MOST_LOAD = 0.6, 1.3  # tried, over the plan's demand; nor do caps change by more
BRACKET = 0.04  # relative width at which a bisection ends
MOST_SIMULATIONS = 9  # of one plan
STEADY = 0.02  # relative change of every cap at which rounds end
STEP = 0.95  # of a workload's caps, where its phases attain and it does not
LEAST_CAP = 0.2


@dataclass(frozen=True)
class Round:
    """One plan under some caps, and what simulation said of it."""

    caps: Mapping[Key, float]
    cost_usd_per_hour: float
    served_share: float
    attainment: Mapping[str, float]  # by workload, at the plan's demand
    requests: Mapping[str, int]  # behind it
    simulations: int

    def attains(self, target: float) -> bool:
        """Whether every workload does, within two standard errors of its sample."""
        return all(
            share >= target - 2.0 * math.sqrt(target * (1.0 - target) / self.requests[name])
            for name, share in self.attainment.items()
        )


@dataclass(frozen=True)
class Calibration:
    """Caps found, by (workload, phase), and the rounds on the way; the first has the old caps."""

    scenario: str
    target: float
    assumed: Mapping[Phase, float]
    chosen: Round
    rounds: tuple[Round, ...]

    @property
    def attained(self) -> bool:
        return self.chosen.attains(self.target)


@dataclass
class _Brackets:
    """Per key the largest load known to attain and the smallest known not to."""

    target: float
    top: float
    seen: dict[Key, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, load: float, shares: Mapping[Key, float]) -> None:
        for key, share in shares.items():
            self.seen[key].append((load, share))

    def of(self, key: Key) -> tuple[float, float]:
        high = min((x for x, share in self.seen[key] if share < self.target), default=None)
        top = self.top if high is None else high
        low = max((x for x, s in self.seen[key] if s >= self.target and x < top), default=0.0)
        return low, top

    def next_load(self) -> float | None:
        """The middle of the widest bracket, above the least load; None: all are narrow."""
        widest, at = 1.0 + BRACKET, None
        for key in self.seen:
            low, high = self.of(key)
            low = max(low, LEAST_LOAD)
            if high / low > widest:
                widest, at = high / low, math.sqrt(low * high)
        return at


def calibrate_caps(
    catalog: Catalog,
    inputs: Inputs,
    load: Load,
    target: float = 0.95,
    most_rounds: int = 6,
) -> Calibration:
    """Plan, find by bisection how much load the plan bears, take that as caps, and plan again.

    A plan bears a load when `target` of every workload's requests meet both objectives. Records the
    caps of the cheapest plan that bears its own demand, or, where none did, of the plan that came
    nearest.
    Raises NoTemplateError: the library is not complete.
    """
    library = read_library(catalog, replace(inputs, caps={}))
    with catalog.read() as connection:
        histories = read_histories(connection)
    assumed = inputs.scenario.placement.utilization
    caps: dict[Key, float] = {}  # from the assumed ones on: the same again gives the same
    rounds: list[Round] = []
    for number in range(most_rounds):
        progress.report("calibrate", number, most_rounds)
        templates = with_caps(library, caps, assumed)
        plan = plan_allocation(allocation_input(inputs, templates))
        busy = busy_shares(plan, caps, assumed)
        found, borne, count = _bear(inputs, plan, load, histories, target)
        used = {key: caps.get(key, assumed[key[1]]) for key in busy}
        shares = {m.workload: m.attainment for m in found.simulated if m.requests}
        came = {m.workload: m.requests for m in found.simulated}
        rounds.append(Round(used, plan.cost_usd_per_hour, plan.served_share, shares, came, count))
        new = {key: _bounded(busy[key] * borne[key]) for key in borne if key in busy}
        for key in new:
            if shares.get(key[0], 1.0) < target:  # both phases in time, but not in the same cases
                new[key] = _bounded(min(new[key], STEP * busy[key]))
        if rounds[-1].attains(target) and all(abs(new[k] / used[k] - 1.0) <= STEADY for k in new):
            break
        caps |= new
    progress.report("calibrate", most_rounds, most_rounds)
    result = Calibration(
        inputs.scenario.name, target, assumed, _choose(rounds, target), tuple(rounds)
    )
    _record(catalog, inputs, result)
    return result


calibrate_task = task(name="calibrate-caps", cache_policy=NO_CACHE)(calibrate_caps)


def busy_shares(plan: Plan, caps: Caps, assumed: Mapping[Phase, float]) -> dict[Key, float]:
    """How full the replicas of a (workload, phase) are, of their throughput without a cap.

    Means over replicas weighted by the workload's load; of a shared one by all its workloads.
    """
    sums: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for planned in plan.replicas:
        phase = planned.template.phase
        full = {
            name: planned.template.serves[name] / caps.get((name, phase), assumed[phase])
            for name in planned.load_rps
        }
        busy = sum(rps / full[name] for name, rps in planned.load_rps.items()) / planned.count
        for name, rps in planned.load_rps.items():
            sums[name, phase].append((rps, busy))
    return {
        key: sum(rps * busy for rps, busy in found) / sum(rps for rps, _ in found)
        for key, found in sums.items()
        if any(rps for rps, _ in found)
    }


def _bear(
    inputs: Inputs, plan: Plan, load: Load, histories: Mapping[str, History], target: float
) -> tuple[Simulation, dict[Key, float], int]:
    """The plan at its own demand, and the largest load that every (workload, phase) bears."""
    fleet, settings = fleet_of_plan(plan), inputs.scenario.placement
    templates = {planned.template.id: planned.template for planned in plan.replicas}
    brackets = _Brackets(target, MOST_LOAD)
    first: Simulation | None = None
    at: float | None = 1.0
    count = 0
    while at is not None and count < MOST_SIMULATIONS:
        asked = replace(load, factor=at)
        found = simulate_fleet(inputs, templates, fleet, asked, histories, fleet.served_rps)
        duration_s = found.result.trace.duration_s
        shares = phase_attainment(
            found.result, found.slos, settings.kv_handover_share,
            (WARM_UP_SHARE * duration_s, duration_s),
        )  # fmt: skip
        brackets.add(at, {key: share.attainment for key, share in shares.items()})
        first, count = first or found, count + 1
        at = brackets.next_load()
    assert first is not None
    return first, {key: max(brackets.of(key)[0], LEAST_LOAD) for key in brackets.seen}, count


def _bounded(cap: float) -> float:
    return min(1.0, max(LEAST_CAP, cap))


def _choose(rounds: Sequence[Round], target: float) -> Round:
    """The cheapest that serves most of those that attain, else the one that came nearest."""
    good = [found for found in rounds if found.attains(target)]
    if not good:
        return max(rounds, key=lambda r: min(r.attainment.values(), default=1.0))
    return min(good, key=lambda r: (-round(r.served_share, 3), r.cost_usd_per_hour))


def _record(catalog: Catalog, inputs: Inputs, result: Calibration) -> None:
    terms = inputs.terms
    count = sum(found.simulations for found in result.rounds)
    rows = [
        simulations.CapRow(
            result.scenario, name, phase, terms[name, phase], cap, result.assumed[phase],
            result.chosen.attainment.get(name, 1.0), result.target, count, "simulated",
        )
        for (name, phase), cap in sorted(result.chosen.caps.items())
    ]  # fmt: skip
    with catalog.write() as connection:
        simulations.write_caps(connection, rows, datetime.now(UTC))
    catalog.publish(force=True)

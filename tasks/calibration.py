"""Utilisation caps by simulation: plans that attain the objectives at the least cost.

Source: docs/formulation.md, section 10, Calibration of the caps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from catalog import simulations
from catalog.store import Catalog
from planner.allocation.plan import Plan
from planner.allocation.solve import plan_allocation
from planner.caps import ANY, CapKey, Caps, cap_of, with_caps
from planner.errors import ImpossibleSloError, NoTemplateError
from planner.types import Phase, Template
from tasks import progress
from tasks.allocation import allocation_input, read_library
from tasks.coral_task import coral_task
from tasks.fleet_engines import fleet_of_plan
from tasks.inputs import Inputs
from tasks.requests import Load
from tasks.simulation import read_histories, simulate_fleet
from tasks.template_caps import LEAST_CAP, Bench, template_cap

STEP = 0.95  # by which caps fall where templates attain alone and their plan does not
ROOM = 0.02  # of attainment over the target from which they rise again


@dataclass(frozen=True)
class Round:
    """One plan under some caps, and what simulation said of it."""

    caps: Caps
    cost_usd_per_hour: float
    served_share: float
    attainment: Mapping[str, float]  # by workload, at the plan's demand
    requests: Mapping[str, int]  # behind it
    measured: int  # caps that were found after it

    def attains(self, target: float) -> bool:
        """Every workload, within two standard errors of its sample."""
        return not any(self._misses(name, target) for name in self.attainment)

    def moves(self, target: float) -> dict[str, float]:
        """By what the caps of workloads change that miss, or have room to spare."""
        found = {}
        for name, share in self.attainment.items():
            if self._misses(name, target):
                found[name] = STEP
            elif share > target + ROOM:
                found[name] = 1.0 / STEP
        return found

    def _misses(self, name: str, target: float) -> bool:
        error = math.sqrt(target * (1.0 - target) / self.requests[name])
        return self.attainment[name] < target - 2.0 * error


@dataclass(frozen=True)
class Calibration:
    """Caps found, and the rounds on the way; the first has the assumed caps."""

    scenario: str
    target: float
    assumed: Mapping[Phase, float]
    chosen: Round
    rounds: tuple[Round, ...]

    @property
    def attained(self) -> bool:
        return self.chosen.attains(self.target)


def calibrate_caps(
    catalog: Catalog,
    inputs: Inputs,
    load: Load,
    target: float = 0.95,
    most_rounds: int = 20,
) -> Calibration:
    """Plan, find the caps of what was planned that has none yet, and plan again.

    A plan bears its demand when `target` of every workload's requests meet both objectives. Records
    the caps of the cheapest plan that does, or, where none did, of the plan that came nearest.
    Raises NoTemplateError: the library is not complete. ImpossibleSloError: no load is low enough.
    """
    library = read_library(catalog, replace(inputs, caps={}, corrections={}))  # as simulated
    with catalog.read() as connection:
        bench = Bench(inputs, library, read_histories(connection), load, target)
    by_id = {template.id: template for template in library}
    assumed = inputs.scenario.placement.utilization
    own: dict[CapKey, float] = {}  # of templates; from none on: the same again gives the same
    caps: dict[CapKey, float] = {}  # and, by the largest of those, of the templates without one
    rounds: list[Round] = []
    for number in range(most_rounds):
        progress.report("calibrate", number, most_rounds)
        plan = _plan(inputs, with_caps(library, caps, assumed), own)
        used = _used(plan, caps, assumed)
        fresh = [key for key in used if key not in own]
        measured = {key: template_cap(bench, by_id[key[2]], key[0]) for key in fresh}
        rounds.append(_round(bench, plan, caps | used, len(fresh)))
        own |= measured
        if not fresh:
            moves = rounds[-1].moves(target)
            if not moves:
                break
            own |= {key: min(1.0, moves[key[0]] * own[key]) for key in used if key[0] in moves}
        caps = own | _of_phases(own, assumed)
    progress.report("calibrate", most_rounds, most_rounds)
    result = Calibration(
        inputs.scenario.name, target, assumed, _choose(rounds, target), tuple(rounds)
    )
    _record(catalog, inputs, result)
    return result


calibrate_task = coral_task("calibrate-caps", calibrate_caps)


def _plan(inputs: Inputs, templates: Sequence[Template], own: Caps) -> Plan:
    try:
        return plan_allocation(allocation_input(inputs, templates))
    except NoTemplateError as error:
        late = sorted({name for (name, _, _), cap in own.items() if cap == 0.0})
        if not late:
            raise
        raise ImpossibleSloError(
            f"requests of {', '.join(late)} are not in time on any template of the library, even "
            f"at {LEAST_CAP:.0%} of its load; loosen the workload's slo, or add node classes"
        ) from error


def _used(plan: Plan, caps: Caps, assumed: Mapping[Phase, float]) -> dict[CapKey, float]:
    """Which workloads are on which templates, and the caps that they were planned with."""
    found = {
        (name, t.phase, t.id): cap_of(caps, name, t, assumed[t.phase])
        for t, loads in ((planned.template, planned.load_rps) for planned in plan.replicas)
        for name, rps in loads.items()
        if rps > 0.0
    }
    return dict(sorted(found.items()))


def _round(bench: Bench, plan: Plan, caps: Caps, measured: int) -> Round:
    """The plan at the demand that it serves."""
    fleet = fleet_of_plan(plan)
    templates = {planned.template.id: planned.template for planned in plan.replicas}
    found = simulate_fleet(
        bench.inputs, templates, fleet, bench.load, bench.histories, fleet.served_rps
    )
    came = [each for each in found.simulated if each.requests]
    return Round(
        caps,
        plan.cost_usd_per_hour,
        plan.served_share,
        {each.workload: each.attainment for each in came},
        {each.workload: each.requests for each in came},
        measured,
    )


def _choose(rounds: Sequence[Round], target: float) -> Round:
    """The cheapest that serves most of those that attain, else the one that came nearest."""
    good = [found for found in rounds if found.attains(target)]
    if not good:
        return max(rounds, key=lambda r: min(r.attainment.values(), default=1.0))
    return min(good, key=lambda r: (-round(r.served_share, 3), r.cost_usd_per_hour))


def _of_phases(caps: Caps, assumed: Mapping[Phase, float]) -> dict[CapKey, float]:
    """For templates that no plan had: the largest of those that one had, at most the assumed one.

    Where none of those is in time at any load, others may still be: theirs stays the assumed one.
    """
    seen: dict[tuple[str, Phase], list[float]] = defaultdict(list)
    for (workload, phase, _), cap in caps.items():
        if cap > 0.0:
            seen[workload, phase].append(cap)
    return {
        (workload, phase, ANY): min(max(found), assumed[phase])
        for (workload, phase), found in seen.items()
    }


def _record(catalog: Catalog, inputs: Inputs, result: Calibration) -> None:
    terms, chosen = inputs.terms, result.chosen
    rows = [
        simulations.CapRow(
            result.scenario, name, phase, template, terms[name, phase], cap, result.assumed[phase],
            chosen.attainment.get(name, 1.0), result.target, len(result.rounds), "simulated",
        )
        for (name, phase, template), cap in sorted(chosen.caps.items())
    ]  # fmt: skip
    with catalog.write() as connection:
        simulations.write_caps(connection, rows, datetime.now(UTC))
    catalog.publish(force=True)

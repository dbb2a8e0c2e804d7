"""Allocate by columns: the least shortfall, then the least cost, each by a `Search`.

Where the relaxation serves all demand one search does both: unserved requests cost more than any
that are served. Source: docs/formulation.md, section 5.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from planner.allocation.assemble import (
    Steps,
    assemble,
    planned_nodes,
    shortfall_tolerance,
    worth_of,
)
from planner.allocation.full_model import least_served_error
from planner.allocation.model import AllocationModel
from planner.allocation.plan import Plan, Worth
from planner.allocation.problem import AllocationInput
from planner.allocation.relaxation import Relaxation, Relaxer, relax
from planner.allocation.search import LEAST_GAP, Effort, Search, is_large, is_small
from planner.errors import SolverStoppedError
from planner.perf.grids import Floats
from planner.programs import Program, solve_program
from planner.solver import Outcome, SolveReport

DEARER = 5.0  # an unserved request/s over the dearest marginal one that is served
MUCH_DEARER = 10.0  # times as much, where half the deadline serves less than all
SHORTFALL_GAP = 1e-4  # of the weighted demand
SHORTFALL_TIME = 0.5  # of the deadline, for plans that serve all, or as much as can be
SHORTFALL_PATIENCE = 0.15  # of the deadline, without less shortfall: the rest goes into the cost
LEAST_SOLVE_S = 0.5  # of the second step, however late the first one ends
FINISH_S = 0.05  # of the deadline, kept to read the plan back


@dataclass(frozen=True)
class _Found:
    """A solution with what was proven, and the relaxation whose prices explain it."""

    values: Floats
    steps: Steps
    explained_by: Relaxation
    is_short: bool


def plan_by_columns(
    data: AllocationInput,
    start: Plan | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """As `plan_allocation`."""
    started = clock()
    effort = Effort()  # its clock starts before the model is built
    model = AllocationModel(data)
    found = _Solve(model, effort, started, clock).run(start)
    values = _settle(model, found.values)
    counts, nodes = model.replicas_of(values), planned_nodes(data, model.nodes_of(values))
    worth = _worth(model, values, found.explained_by, found.is_short)
    return replace(
        assemble(data, counts, nodes, worth, found.steps, clock() - started),
        columns_seen=effort.columns_seen,
        columns_kept=effort.columns_kept,
        phase_seconds=dict(effort.seconds),
        history=tuple(effort.history),
    )


def worth_of_plan(data: AllocationInput, plan: Plan) -> Worth:
    """What binds in a plan that was not solved for just now."""
    model = AllocationModel(data)
    tolerance = shortfall_tolerance(data)
    least = relax(model, model.fulfilling(model.shortfall))
    is_short = plan.weighted_shortfall > tolerance
    explained = least
    if not is_short:
        capped = limited(model.fulfilling(model.program.cost), model, tolerance)
        explained = relax(model, capped, least.pool)
    return _worth(model, model.values_of(plan), explained, is_short)


class _Solve:
    """The two steps of one allocation."""

    def __init__(
        self, model: AllocationModel, effort: Effort, started: float, clock: Callable[[], float]
    ) -> None:
        self.model, self.effort, self.relaxer = model, effort, Relaxer(model)
        self.settings = model.data.settings
        self.tolerance = shortfall_tolerance(model.data)
        self.demand = max(model.data.weighted_demand, self.tolerance)
        self.started, self.clock = started, clock

    def _until(self, share: float) -> float:
        """perf_counter() at which so much of the deadline has passed."""
        passed = self.clock() - self.started
        return time.perf_counter() + share * (1 - FINISH_S) * self.settings.deadline_s - passed

    def run(self, start: Plan | None) -> _Found:
        model = self.model
        first = None if start is None else model.values_of(start)
        with self.effort.timed("relaxation"):
            least = self._least_shortfall()
        if least.objective > self.tolerance or is_small(model):
            return self._in_two_steps(first)
        capped = limited(model.program, model, self.tolerance)
        with self.effort.timed("relaxation"):
            cheapest = self.relaxer.solve(capped)
        dearest = np.max(cheapest.duals[model.demand_rows] / model.weight, initial=0.0)
        dear = DEARER * max(float(dearest), 1e-9)
        if is_large(model, cheapest):
            dear *= MUCH_DEARER
        search = self._blended(dear, first)
        search.run(self._until(SHORTFALL_TIME))
        if self._is_short(self._values(search)):
            if search.done and search.serving_all is None:  # perhaps no integers serve all
                return self._in_two_steps(search.values)
            search = self._dearer(search, MUCH_DEARER * dear)
        search.run(self._until(1.0))
        while search.done and self._is_short(self._values(search)) and self._has_time:
            dear *= MUCH_DEARER  # still a bargain to leave something unserved
            search = self._dearer(search, MUCH_DEARER * dear)
            search.run(self._until(1.0))
        values = self._values(search)
        if self._is_short(values) and search.serving_all is not None:
            values = search.serving_all
        if not self._is_short(values):
            nothing_short = SolveReport(Outcome.PROVEN, 0.0, 0.0, 0.0)
            steps = Steps(nothing_short, self._cost_report(values, search))
            return _Found(values, steps, cheapest, is_short=False)
        short, cost = (float(c @ values) for c in (model.shortfall, model.program.cost))
        unproven = SolveReport(Outcome.INCUMBENT, short, 0.0, short / self.demand)
        bound = self.relaxer.solve(limited(model.program, model, short))
        gap = max(0.0, cost - bound.objective) / cost if cost else 0.0
        steps = Steps(unproven, SolveReport(Outcome.INCUMBENT, cost, bound.objective, gap))
        return _Found(values, steps, least, is_short=True)

    def _cost_report(self, values: Floats, search: Search) -> SolveReport:
        """A0 of a plan that serves all, with a bound on all such plans."""
        cost = float(self.model.program.cost @ values)
        bound = min(cost, search.bound)
        gap = (cost - bound) / cost if cost else 0.0
        proven = gap <= max(self.settings.relative_gap, LEAST_GAP)
        return SolveReport(Outcome.PROVEN if proven else Outcome.INCUMBENT, cost, bound, gap)

    def _blended(self, dear: float, first: Floats | None) -> Search:
        """A search for A0 and `dear` USD for every unserved weighted request/s."""
        model = self.model
        blended = replace(model.program, cost=model.program.cost + dear * model.shortfall)
        return self._search(blended, first, 1e-9, self.settings.relative_gap)

    def _dearer(self, search: Search, dear: float) -> Search:
        """The same with unserved requests at another price, from where it stands."""
        dearer = self._blended(dear, None)
        dearer.follow(search)
        return dearer

    @property
    def _has_time(self) -> bool:
        return self._until(1.0) - time.perf_counter() > LEAST_SOLVE_S

    def _least_shortfall(self) -> Relaxation:
        """The relaxation of the shortfall, with A11 kept.

        Raises LeastServedError where it can't be.
        """
        model = self.model
        if model.parts.missed.size:
            cost = np.zeros(model.program.columns)
            cost[model.parts.missed] = 1.0
            if self.relaxer.solve(model.fulfilling(cost)).objective > self.tolerance:
                raise least_served_error(model.data)
        return self.relaxer.solve(replace(model.program, cost=model.shortfall))

    def _in_two_steps(self, first: Floats | None) -> _Found:
        """The least shortfall, then the least cost at it."""
        model = self.model
        shortage = replace(model.program, cost=model.shortfall)
        search = self._search(shortage, first, self.demand, SHORTFALL_GAP)
        patience_s = SHORTFALL_PATIENCE * self.settings.deadline_s
        search.run(self._until(SHORTFALL_TIME), patience_s)
        values = self._values(search)
        capped = limited(model.program, model, search.objective + self.tolerance)
        cheapest = self._search(capped, values, 1e-9, self.settings.relative_gap)
        cheapest.run(max(self._until(1.0), time.perf_counter() + LEAST_SOLVE_S))
        is_short = self._is_short(values)
        steps = Steps(_report(search), _report(cheapest))
        explained = cheapest.relaxation
        if is_short:  # from no basis: prices of a degenerate optimum depend on the way there
            explained = relax(model, shortage, search.relaxation.pool)
        return _Found(self._values(cheapest), steps, explained, is_short)

    def _is_short(self, values: Floats) -> bool:
        return float(self.model.shortfall @ values) > self.tolerance

    def _search(self, program: Program, first: Floats | None, scale: float, gap: float) -> Search:
        search = Search(self.model, program, gap, scale, self.effort, self.relaxer)
        if first is not None:
            search.offer(first)
        nothing = self.model.nothing()
        if not self.model.parts.missed.size and program.row_upper[self.model.shortfall_row] > (
            float(self.model.shortfall @ nothing)
        ):
            search.offer(nothing)
        return search

    def _values(self, search: Search) -> Floats:
        if search.values is None:
            if self.model.parts.missed.size:
                raise least_served_error(self.model.data)
            raise SolverStoppedError("allocation: no plan before the deadline; raise deadline_s")
        return search.values


def limited(program: Program, model: AllocationModel, shortfall: float) -> Program:
    """The program with at most so much weighted shortfall."""
    upper = program.row_upper.copy()
    upper[model.shortfall_row] = shortfall
    return replace(program, row_upper=upper)


def _report(search: Search) -> SolveReport:
    outcome = Outcome.PROVEN if search.done else Outcome.INCUMBENT
    return SolveReport(outcome, search.objective, search.bound, search.gap)


def _settle(model: AllocationModel, values: Floats) -> Floats:
    """The cheapest nodes for the replicas, exactly as many as they use."""
    x = model.parts.replicas
    used = model.program.matrix[:, x] @ values[x]
    others = np.setdiff1d(np.arange(values.size), x)
    part = model.program.of_columns(others).given(used)
    exact = part.row_lower.copy()
    exact[model.node_rows] = part.row_upper[model.node_rows]
    short = float(model.shortfall @ values)
    part = limited(replace(part, row_lower=exact), model, short + shortfall_tolerance(model.data))
    found = solve_program(part, relative_gap=1e-9)
    if found.values is None:
        raise SolverStoppedError("allocation: the nodes of a plan could not be settled")
    settled = values.copy()
    settled[others] = found.values
    return settled


def _worth(model: AllocationModel, values: Floats, explained: Relaxation, is_short: bool) -> Worth:
    rows, limits = list(model.limits), list(model.limits.values())
    used = (model.program.matrix @ values)[rows].tolist()
    return worth_of(model.data, limits, used, explained.duals[rows].tolist(), is_short)

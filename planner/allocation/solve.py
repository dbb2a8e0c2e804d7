"""Solve an allocation in two steps and read the plan back.

Scarcity comes first: the least weighted shortfall, then the least cost among the plans that have
it (lexicographic). With enough stock the first step ends at once with a shortfall of zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pulp

from planner.allocation.check import PlanCheckError, check_plan
from planner.allocation.load import SharedLoad, share_load
from planner.allocation.plan import Binding, Plan, PlannedNodes, PlannedReplicas, WorkloadService
from planner.allocation.problem import (
    AllocationInput,
    AllocationProblem,
    NodeKey,
    build_allocation,
    node_key,
)
from planner.errors import LeastServedError
from planner.solver import Outcome, SolveReport, require_feasible, solve
from planner.types import Phase

SHORTFALL_TOLERANCE = 1e-6  # of the weighted demand
LEAST_SOLVE_S = 1.0  # of the second step, however late the first one ends


@dataclass(frozen=True, slots=True)
class _Steps:
    shortfall: SolveReport
    cost: SolveReport


@dataclass(frozen=True, slots=True)
class _Worth:
    prices: Mapping[str, float]
    unit: str


def plan_allocation(
    data: AllocationInput,
    start: Plan | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """The cheapest plan among those of least weighted shortfall.

    `start` is a plan of the same workloads, templates and offers to begin from. The gap of a plan
    is the larger of its two steps' relative gaps; the shortfall's is relative to the weighted
    demand. `clock` only measures how long the solve took. The plan is rechecked on its integers
    before it is returned.
    Raises LeastServedError: a least served share that no plan reaches. SolverStoppedError: the
    deadline passed without any plan.
    """
    started = clock()
    allocation = build_allocation(data)
    if start is not None:
        _set_values(allocation, data, start)
    steps = _solve_steps(allocation, data, start, lambda: clock() - started)
    counts = {
        key: count
        for key, variable in allocation.replicas.items()
        if (count := round(variable.value() or 0.0)) > 0
    }
    nodes = tuple(
        PlannedNodes(offer, count, max(0, count - data.held.get(node_key(offer), 0)))
        for offer in data.offers
        if (count := round(allocation.nodes[node_key(offer)].value() or 0.0)) > 0
    )
    used = {name: _used(allocation, name) for name in allocation.limits}
    short = steps.shortfall.objective > SHORTFALL_TOLERANCE * max(1.0, data.weighted_demand)
    worth = _worth(allocation, data, short)
    plan = _plan(data, counts, nodes, _binding(allocation, used, worth), steps, clock() - started)
    plan = replace(plan, objective_usd=objective_usd(data, plan))
    check_plan(data, plan)
    return plan


def keep_running(
    data: AllocationInput,
    replicas: Mapping[tuple[str, str], int],
    nodes: Mapping[NodeKey, int],
) -> Plan | None:
    """A running plan under today's prices, demand and offers; None if they no longer allow it.

    `replicas` counts by (template id, domain). Nothing starts or ends; only the loads may change.
    """
    offers = {node_key(offer): offer for offer in data.offers}
    known = {template.id: index for index, template in enumerate(data.templates)}
    if not nodes.keys() <= offers.keys() or any(key not in known for key, _ in replicas):
        return None
    counts = {(known[key], domain): count for (key, domain), count in replicas.items()}
    planned = tuple(
        PlannedNodes(offers[key], count, max(0, count - data.held.get(key, 0)))
        for key, count in sorted(nodes.items())
    )
    unsolved = SolveReport(Outcome.INCUMBENT, 0.0, 0.0, 0.0)
    kept = _plan(data, counts, planned, (), _Steps(unsolved, unsolved), 0.0)
    kept = replace(kept, objective_usd=objective_usd(data, kept))
    try:
        check_plan(data, kept)
    except PlanCheckError:  # less stock, a new quota, a domain no longer allowed
        return None
    return kept


def binding_limits(data: AllocationInput, plan: Plan) -> tuple[Binding, ...]:
    """What binds in a plan that was not solved for just now."""
    allocation = build_allocation(data, enforce_least_served=False)
    _set_values(allocation, data, plan)
    used = {name: _used(allocation, name) for name in allocation.limits}
    tolerance = SHORTFALL_TOLERANCE * max(1.0, data.weighted_demand)
    limit = plan.weighted_shortfall + tolerance
    allocation.problem += allocation.shortfall <= limit, "scarcity_least_shortfall"
    allocation.problem.setObjective(allocation.cost)
    return _binding(allocation, used, _worth(allocation, data, limit > 2 * tolerance))


def objective_usd(data: AllocationInput, plan: Plan) -> float:
    """A0 of a plan over the horizon: rent, start-ups, drains and egress."""
    settings = data.settings
    running = {node_key(n.offer): n.count for n in plan.nodes}
    total = settings.horizon_hours * (plan.cost_usd_per_hour + plan.egress_usd_per_hour)
    for offer in data.offers:
        change = running.get(node_key(offer), 0) - data.held.get(node_key(offer), 0)
        minutes = settings.startup_minutes if change > 0 else settings.drain_minutes
        total += minutes / 60.0 * offer.price_usd_per_hour * abs(change)
    return total


def _solve_steps(
    allocation: AllocationProblem,
    data: AllocationInput,
    start: Plan | None,
    elapsed_s: Callable[[], float],
) -> _Steps:
    settings, problem = data.settings, allocation.problem
    tolerance = SHORTFALL_TOLERANCE * max(1.0, data.weighted_demand)
    if start is not None and start.weighted_shortfall <= tolerance:
        first = SolveReport(Outcome.PROVEN, 0.0, 0.0, 0.0)  # nothing is less than no shortfall
    else:
        problem.setObjective(allocation.shortfall)
        first = solve(
            problem,
            time_limit_s=settings.deadline_s / 2,
            relative_gap=1e-4,
            warm=start is not None,
        )
        if first.outcome is Outcome.INFEASIBLE:
            raise _least_served_error(data)
    limit = max(0.0, first.objective) + tolerance
    problem += allocation.shortfall <= limit, "scarcity_least_shortfall"
    problem.setObjective(allocation.cost)
    second = require_feasible(
        problem,
        solve(
            problem,
            time_limit_s=max(LEAST_SOLVE_S, settings.deadline_s - elapsed_s()),
            relative_gap=settings.relative_gap,
            warm=True,
        ),
    )
    return _Steps(first, second)


def _set_values(allocation: AllocationProblem, data: AllocationInput, plan: Plan) -> None:
    """Give the variables a plan's values, for the solver to start from."""
    planned = {(r.template.id, r.domain): r for r in plan.replicas}
    for (index, domain), variable in allocation.replicas.items():
        found = planned.get((data.templates[index].id, domain))
        variable.varValue = found.count if found else 0
    for variable in allocation.paired.values():
        variable.varValue = 0.0
    for (name, index, domain), variable in allocation.load.items():
        found = planned.get((data.templates[index].id, domain))
        variable.varValue = found.load_rps.get(name, 0.0) if found else 0.0
        if data.templates[index].phase is Phase.PREFILL:
            allocation.paired[name, domain].varValue += variable.varValue
    running = {node_key(n.offer): n.count for n in plan.nodes}
    for key, variable in allocation.nodes.items():
        variable.varValue = running.get(key, 0)
        change = variable.varValue - data.held.get(key, 0)
        allocation.new_nodes[key].varValue = max(0, change)
        allocation.dropped[key].varValue = max(0, -change)
    for service in plan.services:
        allocation.short[service.workload].varValue = service.short_rps


def _used(allocation: AllocationProblem, name: str) -> float:
    """Left-hand side of a limit at the integer solution."""
    # PuLP's value of a constraint is left minus right.
    slack = float(allocation.problem.constraints[name].value() or 0.0)
    return allocation.limits[name].amount + slack


def _worth(allocation: AllocationProblem, data: AllocationInput, short: bool) -> _Worth:
    """What one more unit of each limit is worth.

    Shadow prices in the linear relaxation: of the cost where all demand is served, of the
    shortfall where it is not. Read the integer solution before: relaxing overwrites the variables.
    """
    problem = allocation.problem
    if short:
        problem.setObjective(allocation.shortfall)
    solve(problem, relax=True)
    scale = 1.0 if short else data.settings.horizon_hours
    prices = {
        name: abs(float(problem.constraints[name].pi or 0.0)) / scale for name in allocation.limits
    }
    return _Worth(prices, "requests/s" if short else "USD/hour")


def _binding(
    allocation: AllocationProblem, used: Mapping[str, float], worth: _Worth
) -> tuple[Binding, ...]:
    """Limits without room for one more, most valuable first."""
    found = [
        Binding(limit, used[name], worth.prices[name], worth.unit)
        for name, limit in allocation.limits.items()
        if limit.amount - used[name] < limit.step * (1.0 - 1e-9)
        and (used[name] > 0 or worth.prices[name] > 0)
    ]
    return tuple(sorted(found, key=lambda b: (-b.worth, b.limit.text)))


def _plan(
    data: AllocationInput,
    counts: Mapping[tuple[int, str], int],
    nodes: tuple[PlannedNodes, ...],
    binding: tuple[Binding, ...],
    steps: _Steps,
    solve_s: float,
) -> Plan:
    shared = share_load(data, counts)
    demand = data.weighted_demand
    short_gap = abs(steps.shortfall.objective - steps.shortfall.bound)
    return Plan(
        replicas=_replicas(data, counts, shared),
        nodes=nodes,
        services=tuple(
            WorkloadService(w.name, w.demand_rps, shared.served_rps[w.name], w.weight)
            for w in data.workloads
        ),
        binding=binding,
        cost_usd_per_hour=sum(n.cost_usd_per_hour for n in nodes),
        egress_usd_per_hour=shared.egress_usd_per_hour,
        objective_usd=steps.cost.objective,
        bound_usd=steps.cost.bound,
        gap=max(steps.cost.gap, short_gap / demand if demand else 0.0),
        proven=steps.cost.outcome is steps.shortfall.outcome is Outcome.PROVEN,
        solve_s=solve_s,
    )


def _replicas(
    data: AllocationInput, counts: Mapping[tuple[int, str], int], shared: SharedLoad
) -> tuple[PlannedReplicas, ...]:
    loads: dict[tuple[int, str], dict[str, float]] = {key: {} for key in counts}
    for (name, index, domain), rps in shared.load_rps.items():
        loads[index, domain][name] = rps
    return tuple(
        PlannedReplicas(data.templates[index], domain, count, loads[index, domain])
        for (index, domain), count in sorted(counts.items())
    )


def _least_served_error(data: AllocationInput) -> LeastServedError:
    """Which least served share fails, and what could be reached instead."""
    allocation = build_allocation(data, enforce_least_served=False)
    problem = allocation.problem
    missed = {}
    for index, workload in enumerate(data.workloads):
        least = data.rules_of(workload.name).least_served
        missed[workload.name] = pulp.LpVariable(f"missed_{index}", 0)
        allowed = (1.0 - least) * workload.demand_rps
        problem += allocation.short[workload.name] - missed[workload.name] <= allowed
    problem.setObjective(pulp.lpSum(missed.values()))
    require_feasible(problem, solve(problem, time_limit_s=data.settings.deadline_s))
    parts = []
    for workload in data.workloads:
        if (missed[workload.name].value() or 0.0) > 1e-6 * workload.demand_rps:
            short = allocation.short[workload.name].value() or 0.0
            least = data.rules_of(workload.name).least_served
            parts.append(
                f"{workload.name!r} asks for {least:.1%} and at most "
                f"{1.0 - short / workload.demand_rps:.1%} can be served"
            )
    return LeastServedError(
        f"no plan keeps the least served shares: {'; '.join(parts)}; lower least_served, or add "
        "stock, domains, quota or budget"
    )

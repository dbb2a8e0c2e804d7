"""The reference: the whole program in PuLP, solved by HiGHS in two steps.

Scarcity comes first: the least weighted shortfall, then the least cost among the plans that have
it (lexicographic).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pulp

from planner.allocation.assemble import (
    Steps,
    assemble,
    planned_nodes,
    shortfall_tolerance,
    worth_of,
)
from planner.allocation.plan import Plan
from planner.allocation.problem import (
    AllocationInput,
    AllocationProblem,
    build_allocation,
)
from planner.errors import LeastServedError, SolverStoppedError
from planner.solver import Outcome, SolveReport, require_feasible, solve
from planner.types import Phase

LEAST_SOLVE_S = 1.0  # of the second step, however late the first one ends


def plan_with_full_model(
    data: AllocationInput,
    start: Plan | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """As `plan_allocation`, by the plain program over all columns."""
    started = clock()
    allocation = build_allocation(data)
    if start is not None:
        _set_values(allocation, data, start)
    better: list[float] = []

    def improved() -> None:
        better.append(clock() - started)

    steps = _solve_steps(allocation, data, start, lambda: clock() - started, improved)
    counts = {
        key: count
        for key, variable in allocation.replicas.items()
        if (count := round(variable.value() or 0.0)) > 0
    }
    nodes = {key: round(v.value() or 0.0) for key, v in allocation.nodes.items()}
    used = [_used(allocation, name) for name in allocation.limits]
    short = steps.shortfall.objective > shortfall_tolerance(data)
    limits = list(allocation.limits.values())
    worth = worth_of(data, limits, used, _duals(allocation, short), short)
    plan = assemble(data, counts, planned_nodes(data, nodes), worth, steps, clock() - started)
    if better:
        plan = replace(plan, history=((better[-1], plan.weighted_shortfall, plan.objective_usd),))
    return plan


def _solve_steps(
    allocation: AllocationProblem,
    data: AllocationInput,
    start: Plan | None,
    elapsed_s: Callable[[], float],
    improved: Callable[[], None],
) -> Steps:
    settings, problem = data.settings, allocation.problem
    tolerance = shortfall_tolerance(data)
    if start is not None and start.weighted_shortfall <= tolerance:
        first = SolveReport(Outcome.PROVEN, 0.0, 0.0, 0.0)  # nothing is less than no shortfall
    else:
        problem.setObjective(allocation.shortfall)
        first = solve(
            problem,
            time_limit_s=settings.deadline_s / 2,
            relative_gap=1e-4,
            warm=start is not None,
            improved=improved,
        )
        if first.outcome is Outcome.INFEASIBLE:
            raise least_served_error(data)
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
            improved=improved,
        ),
    )
    return Steps(first, second)


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
    running = plan.node_counts
    for key, variable in allocation.nodes.items():
        variable.varValue = running.get(key, 0)
        change = variable.varValue - data.held.get(key, 0)
        allocation.new_nodes[key].varValue = max(0, change)
        allocation.dropped[key].varValue = max(0, -change)
    for replicas, ended in zip(data.running, allocation.ended, strict=True):
        found = planned.get((replicas.template.id, replicas.domain))
        ended.varValue = max(0, replicas.count - (found.count if found else 0))
    for service in plan.services:
        allocation.short[service.workload].varValue = service.short_rps


def _used(allocation: AllocationProblem, name: str) -> float:
    """Left-hand side of a limit at the integer solution."""
    # PuLP's value of a constraint is left minus right.
    slack = float(allocation.problem.constraints[name].value() or 0.0)
    return allocation.limits[name].amount + slack


def _duals(allocation: AllocationProblem, short: bool) -> list[float]:
    """Shadow prices of the limits in the linear relaxation: of the cost, or of the shortfall.

    Read the integer solution before: relaxing overwrites the variables.
    """
    problem = allocation.problem
    if short:
        problem.setObjective(allocation.shortfall)
    solve(problem, relax=True)
    return [float(problem.constraints[name].pi or 0.0) for name in allocation.limits]


def least_served_error(data: AllocationInput) -> LeastServedError:
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
    if not parts:
        raise SolverStoppedError("allocation: no plan before the deadline; raise deadline_s")
    return LeastServedError(
        f"no plan keeps the least served shares: {'; '.join(parts)}; lower least_served, or add "
        "stock, domains, quota or budget"
    )

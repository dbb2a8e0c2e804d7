"""Solve an allocation in two steps and read the plan back.

Scarcity comes first: the least weighted shortfall, then the least cost among the plans that have
it (lexicographic). With enough stock the first step ends at once with a shortfall of zero.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.allocation.check import check_plan
from planner.allocation.plan import (
    BindingStock,
    Plan,
    PlannedNodes,
    PlannedReplicas,
    WorkloadService,
)
from planner.allocation.problem import (
    AllocationInput,
    AllocationProblem,
    build_allocation,
    node_key,
)
from planner.solver import Outcome, SolveReport, require_feasible, solve
from planner.types import Phase

SHORTFALL_TOLERANCE = 1e-6  # requests/s, weighted


@dataclass(frozen=True, slots=True)
class _Steps:
    shortfall: SolveReport
    cost: SolveReport


def plan_allocation(
    data: AllocationInput, clock: Callable[[], float] = time.perf_counter
) -> Plan:
    """The cheapest plan among those of least weighted shortfall.

    The gap of a plan is the larger of its two steps' relative gaps; the shortfall's is relative
    to the weighted demand. `clock` only measures how long the solve took.
    The plan is rechecked on its integers before it is returned.
    Raises SolverStoppedError: the deadline passed without any plan.
    """
    started = clock()
    allocation = build_allocation(data)
    steps = _solve_steps(allocation, data)
    plan = _read_back(data, allocation, steps, clock() - started)
    check_plan(data, plan)
    return plan


def _solve_steps(allocation: AllocationProblem, data: AllocationInput) -> _Steps:
    settings = data.settings
    weighted_demand = sum(w.weight * w.demand_rps for w in data.workloads)
    problem = allocation.problem
    problem.setObjective(allocation.shortfall)
    first = require_feasible(
        problem, solve(problem, time_limit_s=settings.deadline_s / 2, relative_gap=1e-4)
    )
    limit = max(0.0, first.objective) + SHORTFALL_TOLERANCE * max(1.0, weighted_demand)
    problem += allocation.shortfall <= limit, "scarcity_least_shortfall"
    problem.setObjective(allocation.cost)
    second = require_feasible(
        problem,
        solve(
            problem, time_limit_s=settings.deadline_s / 2, relative_gap=settings.relative_gap
        ),
    )
    return _Steps(first, second)


def _stock_worth(data: AllocationInput, allocation: AllocationProblem) -> dict[str, float]:
    """USD per hour that one more node of each stock row saves at the same service.

    Shadow prices of A2 in the linear relaxation of the second step. Read the integer solution
    before: relaxing overwrites the variables.
    """
    problem = allocation.problem
    solve(problem, relax=True)
    return {
        name: abs(float(problem.constraints[name].pi or 0.0)) / data.settings.horizon_hours
        for name in allocation.stock_rows.values()
    }


def _read_back(
    data: AllocationInput, allocation: AllocationProblem, steps: _Steps, solve_s: float
) -> Plan:
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
    services = tuple(
        WorkloadService(
            workload=workload.name,
            demand_rps=workload.demand_rps,
            served_rps=_served(workload.demand_rps, allocation.short[workload.name].value()),
            weight=workload.weight,
        )
        for workload in data.workloads
    )
    demand = sum(w.weight * w.demand_rps for w in data.workloads)
    short_gap = abs(steps.shortfall.objective - steps.shortfall.bound)
    return Plan(
        replicas=_share_load(data, counts, services),
        nodes=nodes,
        services=services,
        binding=_binding_stock(nodes, allocation, _stock_worth(data, allocation)),
        cost_usd_per_hour=sum(n.offer.price_usd_per_hour * n.count for n in nodes),
        objective_usd=steps.cost.objective,
        bound_usd=steps.cost.bound,
        gap=max(steps.cost.gap, short_gap / demand if demand else 0.0),
        proven=steps.cost.outcome is steps.shortfall.outcome is Outcome.PROVEN,
        solve_s=solve_s,
    )


def _served(demand_rps: float, short_rps: float | None) -> float:
    served = demand_rps - (short_rps or 0.0)
    # What the scarcity step tolerates is not a shortfall to report.
    return demand_rps if demand_rps - served <= 1e-5 * demand_rps else max(0.0, served)


def _share_load(
    data: AllocationInput, counts: dict[tuple[int, str], int], services: Sequence[WorkloadService]
) -> tuple[PlannedReplicas, ...]:
    """Spread what is served over replicas in proportion to throughput: the router's weights."""
    capacity: Counter[tuple[str, str, Phase]] = Counter()
    for (index, domain), count in counts.items():
        template = data.templates[index]
        capacity[template.workload, domain, template.phase] += template.throughput_rps * count
    domains = {domain for _, domain in counts}
    paired = {
        (service.workload, domain): min(
            capacity[service.workload, domain, phase] for phase in Phase
        )
        for service in services
        for domain in domains
    }
    served = {service.workload: service.served_rps for service in services}
    total = {name: sum(paired[name, domain] for domain in domains) for name in served}
    replicas = []
    for (index, domain), count in sorted(counts.items()):
        template = data.templates[index]
        name = template.workload
        share = served[name] / total[name] if total[name] else 0.0
        portion = template.throughput_rps * count / capacity[name, domain, template.phase]
        replicas.append(
            PlannedReplicas(template, domain, count, paired[name, domain] * share * portion)
        )
    return tuple(replicas)


def _binding_stock(
    nodes: Sequence[PlannedNodes], allocation: AllocationProblem, worth: dict[str, float]
) -> tuple[BindingStock, ...]:
    used: Counter[tuple[str, str]] = Counter()
    offers = {}
    for planned in nodes:
        place = (planned.offer.domain, planned.offer.instance_type)
        used[place] += planned.count
        offers[place] = planned.offer
    return tuple(
        BindingStock(offers[place], used[place], worth[allocation.stock_rows[place]])
        for place in sorted(used)
        if used[place] == offers[place].stock
    )

"""Solve an allocation in two steps and read the plan back.

Scarcity comes first: the least weighted shortfall, then the least cost among the plans that have
it (lexicographic). With enough stock the first step ends at once with a shortfall of zero.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
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
    set_values,
)
from planner.solver import Outcome, SolveReport, require_feasible, solve
from planner.types import Phase

SHORTFALL_TOLERANCE = 1e-6  # requests/s, weighted


@dataclass(frozen=True, slots=True)
class _Steps:
    shortfall: SolveReport
    cost: SolveReport


def plan_allocation(
    data: AllocationInput,
    start: Plan | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """The cheapest plan among those of least weighted shortfall.

    `start` is a plan of the same input to begin from; the answer is never worse than it. The gap
    of a plan is the larger of its two steps' relative gaps; the shortfall's is relative to the
    weighted demand. `clock` only measures how long the solve took. The plan is rechecked on its
    integers before it is returned.
    Raises SolverStoppedError: the deadline passed without any plan.
    """
    started = clock()
    allocation = build_allocation(data)
    if start is not None:
        set_values(allocation, data, start)
    steps = _solve_steps(allocation, data, start, lambda: clock() - started)
    plan = _read_back(data, allocation, steps, clock() - started)
    check_plan(data, plan)
    return plan


def _solve_steps(
    allocation: AllocationProblem,
    data: AllocationInput,
    start: Plan | None,
    elapsed_s: Callable[[], float],
) -> _Steps:
    settings = data.settings
    problem = allocation.problem
    tolerance = SHORTFALL_TOLERANCE * max(1.0, _weighted_demand(data))
    if start is not None and start.weighted_shortfall <= tolerance:
        first = SolveReport(Outcome.PROVEN, 0.0, 0.0, 0.0)  # nothing is less than no shortfall
    else:
        problem.setObjective(allocation.shortfall)
        first = require_feasible(
            problem,
            solve(
                problem,
                time_limit_s=settings.deadline_s / 2,
                relative_gap=1e-4,
                warm=start is not None,
            ),
        )
    limit = max(0.0, first.objective) + tolerance
    problem += allocation.shortfall <= limit, "scarcity_least_shortfall"
    problem.setObjective(allocation.cost)
    second = require_feasible(
        problem,
        solve(
            problem,
            time_limit_s=max(1.0, settings.deadline_s - elapsed_s()),
            relative_gap=settings.relative_gap,
            warm=True,
        ),
    )
    return _Steps(first, second)


def _weighted_demand(data: AllocationInput) -> float:
    return sum(w.weight * w.demand_rps for w in data.workloads)


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
    capacity = _capacity(data, counts)
    services = tuple(
        WorkloadService(
            workload=workload.name,
            demand_rps=workload.demand_rps,
            # From the integers: the solver's own shortfall carries its tolerance.
            served_rps=min(workload.demand_rps, sum(capacity.paired(workload.name).values())),
            weight=workload.weight,
        )
        for workload in data.workloads
    )
    demand = _weighted_demand(data)
    short_gap = abs(steps.shortfall.objective - steps.shortfall.bound)
    return Plan(
        replicas=_share_load(data, counts, services, capacity),
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


@dataclass(frozen=True)
class _Capacity:
    """Requests/s that the replicas of each (workload, domain, phase) can take."""

    rps: Mapping[tuple[str, str, Phase], float]

    def paired(self, workload: str) -> dict[str, float]:
        """By domain: what prefill and decode both can take."""
        domains = sorted({domain for name, domain, _ in self.rps if name == workload})
        return {
            domain: min(self.rps.get((workload, domain, phase), 0.0) for phase in Phase)
            for domain in domains
        }


def _capacity(data: AllocationInput, counts: Mapping[tuple[int, str], int]) -> _Capacity:
    rps: dict[tuple[str, str, Phase], float] = defaultdict(float)
    for (index, domain), count in counts.items():
        template = data.templates[index]
        rps[template.workload, domain, template.phase] += template.throughput_rps * count
    return _Capacity(rps)


def _share_load(
    data: AllocationInput,
    counts: Mapping[tuple[int, str], int],
    services: Sequence[WorkloadService],
    capacity: _Capacity,
) -> tuple[PlannedReplicas, ...]:
    """Spread what is served over replicas in proportion to throughput: the router's weights."""
    paired = {s.workload: capacity.paired(s.workload) for s in services}
    served = {s.workload: s.served_rps for s in services}
    replicas = []
    for (index, domain), count in sorted(counts.items()):
        template = data.templates[index]
        name = template.workload
        total = sum(paired[name].values())
        in_domain = paired[name][domain] * served[name] / total if total else 0.0
        portion = template.throughput_rps * count / capacity.rps[name, domain, template.phase]
        replicas.append(PlannedReplicas(template, domain, count, in_domain * portion))
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

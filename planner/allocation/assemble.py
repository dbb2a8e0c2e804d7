"""From integers to a plan: loads, costs, what binds; shared by all ways to solve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.allocation.check import check_plan
from planner.allocation.limits import Limit
from planner.allocation.load import SharedLoad, share_load
from planner.allocation.plan import (
    Binding,
    ClassWorth,
    Plan,
    PlannedNodes,
    PlannedReplicas,
    WorkloadService,
    Worth,
)
from planner.allocation.problem import AllocationInput, NodeKey, node_key
from planner.solver import Outcome, SolveReport

SHORTFALL_TOLERANCE = 1e-6  # of the weighted demand


@dataclass(frozen=True, slots=True)
class Steps:
    """Least shortfall, then least cost."""

    shortfall: SolveReport
    cost: SolveReport


def shortfall_tolerance(data: AllocationInput) -> float:
    """What counts as no shortfall, weighted requests/s."""
    return SHORTFALL_TOLERANCE * max(1.0, data.weighted_demand)


def planned_nodes(data: AllocationInput, counts: Mapping[NodeKey, int]) -> tuple[PlannedNodes, ...]:
    """Nodes by offer, in the order of the offers."""
    return tuple(
        PlannedNodes(offer, count, max(0, count - data.held.get(node_key(offer), 0)))
        for offer in data.offers
        if (count := counts.get(node_key(offer), 0)) > 0
    )


def worth_of(
    data: AllocationInput,
    limits: Sequence[Limit],
    used: Sequence[float],
    duals: Sequence[float],
    is_short: bool,
) -> Worth:
    """Limits without room for one more, and what a node of every class would be worth.

    What one more unit is worth are the duals of the linear relaxation: of the shortfall where
    demand falls short, else of the cost over the horizon.
    """
    scale = 1.0 if is_short else data.settings.horizon_hours
    unit = "requests/s" if is_short else "USD/hour"
    found = [
        Binding(limit, use, price, unit)
        for limit, use, dual in zip(limits, used, duals, strict=True)
        for price in [abs(dual) / scale]
        if limit.amount - use < limit.step * (1.0 - 1e-9) and (use > 0 or price > 0)
    ]
    best: dict[str, ClassWorth] = {}
    for limit, dual in zip(limits, duals, strict=True):
        if (offer := limit.offer) is not None:
            one = ClassWorth(offer.node_class, offer.domain, abs(dual) / scale, unit)
            if offer.node_class not in best or one.worth > best[offer.node_class].worth:
                best[offer.node_class] = one
    return Worth(
        binding=tuple(sorted(found, key=lambda b: (-b.worth, b.limit.text))),
        classes=tuple(sorted(best.values(), key=lambda c: (-c.worth, c.node_class))),
    )


def assemble(
    data: AllocationInput,
    counts: Mapping[tuple[int, str], int],
    nodes: tuple[PlannedNodes, ...],
    worth: Worth,
    steps: Steps,
    solve_s: float,
) -> Plan:
    """The plan of some replicas and nodes, rechecked on its integers.

    Raises PlanCheckError; InfeasiblePlanError where these replicas can't keep A11.
    """
    shared = share_load(data, counts)
    demand = data.weighted_demand
    short_gap = abs(steps.shortfall.objective - steps.shortfall.bound)
    short_gap = short_gap / demand if demand else 0.0
    plan = Plan(
        replicas=_replicas(data, counts, shared),
        nodes=nodes,
        services=tuple(
            WorkloadService(w.name, w.demand_rps, shared.served_rps[w.name], w.weight)
            for w in data.workloads
        ),
        worth=worth,
        cost_usd_per_hour=sum(n.cost_usd_per_hour for n in nodes),
        egress_usd_per_hour=shared.egress_usd_per_hour,
        objective_usd=steps.cost.objective,
        bound_usd=steps.cost.bound,
        gap=max(steps.cost.gap, short_gap),
        proven=steps.cost.outcome is steps.shortfall.outcome is Outcome.PROVEN,
        solve_s=solve_s,
        shortfall_gap=short_gap,
    )
    plan = replace(plan, objective_usd=objective_usd(data, plan))
    check_plan(data, plan)
    return plan


def objective_usd(data: AllocationInput, plan: Plan) -> float:
    """A0 of a plan over the horizon: rent, start-ups, drains, replicas that end and egress."""
    settings = data.settings
    running = plan.node_counts
    total = settings.horizon_hours * (plan.cost_usd_per_hour + plan.egress_usd_per_hour)
    for offer in data.offers:
        change = running.get(node_key(offer), 0) - data.held.get(node_key(offer), 0)
        minutes = settings.startup_minutes if change > 0 else settings.drain_minutes
        total += minutes / 60.0 * offer.price_usd_per_hour * abs(change)
    planned = plan.replica_counts
    for replicas in data.running:
        ended = replicas.count - planned.get((replicas.template.id, replicas.domain), 0)
        total += data.restart_usd(replicas.template, replicas.domain) * max(0, ended)
    return total


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

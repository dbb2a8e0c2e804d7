"""Homo-joint: every replica on one node class, all models planned together.

The same templates, constraints and solver as Coral's own allocation; only replicas that mix node
classes are left out. Stronger than planning models one after another on what is left.
"""

from __future__ import annotations

from dataclasses import replace

from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput
from planner.allocation.solve import plan_allocation


def plan_homo_joint(data: AllocationInput) -> Plan:
    """The cheapest plan whose every replica runs on nodes of one class.

    A workload that no single class can serve stays short, as it would be with such a planner.
    """
    pure = tuple(template for template in data.templates if template.is_homogeneous)
    return plan_allocation(replace(data, templates=pure))


def plan_never_worse(data: AllocationInput, homo: Plan) -> Plan:
    """Coral's plan, started from Homo-joint's; Homo-joint's where Coral's would be worse.

    Both are plans of Coral's program, so Coral's bound holds for either. The time is that of
    both, since one starts from the other.
    """
    coral = plan_allocation(data, start=homo)
    coral = replace(coral, solve_s=coral.solve_s + homo.solve_s)
    if better_of(coral, homo) is coral:
        return coral
    spare = max(0.0, homo.objective_usd - coral.bound_usd)
    gap = spare / homo.objective_usd if homo.objective_usd else 0.0
    return replace(
        coral,
        replicas=homo.replicas,
        nodes=homo.nodes,
        services=homo.services,
        cost_usd_per_hour=homo.cost_usd_per_hour,
        egress_usd_per_hour=homo.egress_usd_per_hour,
        objective_usd=homo.objective_usd,
        gap=max(gap, coral.gap),
    )


def better_of(mine: Plan, other: Plan) -> Plan:
    """The plan that serves more or, serving the same, costs less; the first on a tie."""
    shortage = other.weighted_shortfall - mine.weighted_shortfall
    demand = sum(service.weight * service.demand_rps for service in mine.services)
    tolerance = 1e-4 * max(1.0, demand)
    if abs(shortage) > tolerance:
        return mine if shortage > 0 else other
    return other if other.objective_usd < mine.objective_usd - 1e-9 else mine

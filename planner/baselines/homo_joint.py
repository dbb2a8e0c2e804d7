"""Homo-joint: every replica on one node class, all models planned together.

The same templates, constraints and solver as Coral's own allocation; only replicas that mix node
classes are left out. Stronger than planning models one after another on what is left.
"""

from __future__ import annotations

from dataclasses import replace

from planner.allocation.assemble import objective_usd
from planner.allocation.check import PlanCheckError, check_plan
from planner.allocation.columns import worth_of_plan
from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput
from planner.allocation.solve import plan_allocation


def plan_homo_joint(data: AllocationInput, max_nodes: int | None = None) -> Plan:
    """The cheapest plan whose every replica runs on nodes of one class, at most `max_nodes`.

    A workload that no single class can serve stays short, as it would be with such a planner, also
    where the scenario asks for a least served share.
    """
    return plan_allocation(with_pure_templates(data, max_nodes).without_promises())


def with_pure_templates(data: AllocationInput, max_nodes: int | None = None) -> AllocationInput:
    """The input with templates on one node class alone, of at most so many nodes."""
    templates = tuple(
        t
        for t in data.templates
        if t.is_homogeneous and (max_nodes is None or t.nodes <= max_nodes)
    )
    return replace(data, templates=templates)


def plan_never_worse(data: AllocationInput, other: Plan) -> Plan:
    """Coral's plan, started from another plan; that one where Coral's would be worse.

    `other` (Homo-joint's, or what runs) is a plan of Coral's program unless it breaks a least
    served share; Coral's bound then holds for it too. The time is that of both, since one starts
    from the other.
    """
    allowed = _is_plan_of(data, other)
    other = replace(other, objective_usd=objective_usd(data, other))  # of all that runs
    coral = plan_allocation(data, start=other if allowed else None)
    coral = replace(coral, solve_s=coral.solve_s + other.solve_s)
    if not allowed or better_of(coral, other) is coral:
        return coral
    return with_bound_of(data, other, coral)


def with_bound_of(data: AllocationInput, plan: Plan, solved: Plan) -> Plan:
    """A plan of the same program with what the solve of another one proved."""
    spare = max(0.0, plan.objective_usd - solved.bound_usd)
    gap = spare / plan.objective_usd if plan.objective_usd else 0.0
    demand = data.weighted_demand
    least = solved.weighted_shortfall - solved.shortfall_gap * demand
    short_gap = max(0.0, plan.weighted_shortfall - least) / demand if demand else 0.0
    gap = max(gap, short_gap)
    return replace(
        plan,
        worth=worth_of_plan(data, plan),
        bound_usd=solved.bound_usd,
        gap=gap,
        proven=solved.proven and gap <= data.settings.relative_gap,
        solve_s=solved.solve_s,
        shortfall_gap=short_gap,
        columns_seen=solved.columns_seen,
        columns_kept=solved.columns_kept,
        phase_seconds=solved.phase_seconds,
        history=solved.history,
    )


def _is_plan_of(data: AllocationInput, plan: Plan) -> bool:
    try:
        check_plan(data, plan)
    except PlanCheckError:
        return False
    return True


def better_of(mine: Plan, other: Plan) -> Plan:
    """The plan that serves more or, serving the same, costs less; the first on a tie."""
    shortage = other.weighted_shortfall - mine.weighted_shortfall
    demand = sum(service.weight * service.demand_rps for service in mine.services)
    tolerance = 1e-4 * max(1.0, demand)
    if abs(shortage) > tolerance:
        return mine if shortage > 0 else other
    return other if other.objective_usd < mine.objective_usd - 1e-9 else mine

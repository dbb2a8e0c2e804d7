"""Recheck a plan on its integers (rounding is where mistakes hide), without the solver."""

from __future__ import annotations

from collections import Counter, defaultdict

from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput
from planner.errors import CoralError
from planner.types import Phase

TOLERANCE = 1e-4


class PlanCheckError(CoralError):
    """A plan that the solver returned breaks a constraint: a defect of the solver."""


def check_plan(data: AllocationInput, plan: Plan) -> None:
    """Raise PlanCheckError unless the plan keeps A1, A2 and A4 to A6."""
    needed: Counter[tuple[str, str]] = Counter()
    capacity: dict[tuple[str, str, Phase], float] = defaultdict(float)
    for planned in plan.replicas:
        template = planned.template
        for name, count in template.combination:
            needed[planned.domain, name] += count * planned.count
        if planned.load_rps > template.throughput_rps * planned.count * (1 + TOLERANCE):
            raise PlanCheckError(f"template {template.id} in {planned.domain} is overloaded (A4)")
        place = (template.workload, planned.domain, template.phase)
        capacity[place] += template.throughput_rps * planned.count
    rented: Counter[tuple[str, str]] = Counter()
    used: Counter[tuple[str, str]] = Counter()
    stock = {(o.domain, o.instance_type): o.stock for o in data.offers}
    for nodes in plan.nodes:
        rented[nodes.offer.domain, nodes.offer.node_class] += nodes.count
        used[nodes.offer.domain, nodes.offer.instance_type] += nodes.count
    if rented != needed:
        raise PlanCheckError("the plan rents other nodes than its replicas need (A1)")
    for (domain, name), count in used.items():
        if count > stock[domain, name]:
            raise PlanCheckError(f"the plan rents {count} {name} in {domain}, too many (A2)")
    domains = sorted({offer.domain for offer in data.offers})
    for service in plan.services:
        paired = sum(
            min(capacity[service.workload, domain, phase] for phase in Phase) for domain in domains
        )
        if paired < service.served_rps * (1 - TOLERANCE) - TOLERANCE:
            raise PlanCheckError(f"{service.workload} is served less than the plan says (A5, A6)")

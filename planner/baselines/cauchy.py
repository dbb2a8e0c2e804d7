"""Cauchy: prefill on one GPU type and decode on one, pairs of them ranked by tokens per dollar.

Workloads come one after another. Each takes its best pair of GPU types as far as stock and demand
go, then the next pair with what is left of the demand. Replicas are on one node class of the pair's
GPU each; within a pair the plan is solved to its optimum.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput
from planner.allocation.solve import plan_allocation
from planner.baselines.homo_joint import with_pure_templates
from planner.baselines.sequential import Orders, PartPlans, plan_in_orders
from planner.types import Phase, Template, gpu_of

NEGLIGIBLE = 1e-6  # of the demand


def plan_cauchy(data: AllocationInput) -> Orders:
    """Plans of several orders."""
    pure = with_pure_templates(data)
    templates = tuple(t for t in pure.templates if t.phase is not Phase.AGGREGATED)
    return plan_in_orders(replace(pure, templates=templates), _plan_one)


def _plan_one(data: AllocationInput) -> Plan:
    workload = data.workloads[0]
    parts, missing = PartPlans(data), workload.demand_rps
    for prefill, decode in _ranked(data):
        if missing <= NEGLIGIBLE * workload.demand_rps:
            break
        templates = tuple(
            template
            for template in data.templates
            if _gpu(template) == (prefill if template.phase is Phase.PREFILL else decode)
        )
        rest = (replace(workload, demand_rps=missing),)
        plan = plan_allocation(replace(parts.left_over(), templates=templates, workloads=rest))
        parts.add(plan)
        missing = plan.services[0].short_rps
    return parts.plan()


def _ranked(data: AllocationInput) -> list[tuple[str, str]]:
    """Pairs of GPU types by dollars per request, cheapest first."""
    price: dict[str, float] = {}
    for offer in data.offers:
        if offer.stock > 0:
            known = price.get(offer.node_class, offer.price_usd_per_hour)
            price[offer.node_class] = min(known, offer.price_usd_per_hour)
    name = data.workloads[0].name
    cheapest: dict[tuple[Phase, str], float] = {}
    for template in data.templates:
        ((node_class, count),) = template.combination
        if node_class in price:
            usd = price[node_class] * count / template.serves[name]
            key = (template.phase, _gpu(template))
            cheapest[key] = min(cheapest.get(key, usd), usd)
    gpus = {
        phase: sorted(gpu for found, gpu in cheapest if found is phase)
        for phase in (Phase.PREFILL, Phase.DECODE)
    }
    pairs = list(product(gpus[Phase.PREFILL], gpus[Phase.DECODE]))
    return sorted(pairs, key=lambda p: cheapest[Phase.PREFILL, p[0]] + cheapest[Phase.DECODE, p[1]])


def _gpu(template: Template) -> str:
    """'L4' of a template on 'L4 x4'."""
    return gpu_of(template.combination[0][0])

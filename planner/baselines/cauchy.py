"""Cauchy: prefill on one GPU type and decode on one, pairs of them ranked by tokens per dollar.

Workloads come one after another. Each takes its best pair of GPU types as far as stock and demand
go, then the next pair with what is left of the demand. Replicas are on one node class of the pair's
GPU each; within a pair the plan is solved to its optimum.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, NodeKey, node_key
from planner.allocation.solve import plan_allocation
from planner.baselines.homo_joint import with_pure_templates
from planner.baselines.sequential import Orders, left_over, plan_in_orders, plan_of
from planner.types import Phase, Template

NEGLIGIBLE = 1e-6  # of the demand


def plan_cauchy(data: AllocationInput) -> Orders:
    """Plans of several orders."""
    pure = with_pure_templates(data)
    templates = tuple(t for t in pure.templates if t.phase is not Phase.AGGREGATED)
    return plan_in_orders(replace(pure, templates=templates), _plan_one)


def _plan_one(data: AllocationInput) -> Plan:
    workload = data.workloads[0]
    counts: Counter[tuple[int, str]] = Counter()
    used: Counter[NodeKey] = Counter()
    missing, seconds = workload.demand_rps, 0.0
    for prefill, decode in _ranked(data):
        if missing <= NEGLIGIBLE * workload.demand_rps:
            break
        chosen = {
            index: template
            for index, template in enumerate(data.templates)
            if _gpu(template) == (prefill if template.phase is Phase.PREFILL else decode)
        }
        numbers = {template.id: index for index, template in chosen.items()}
        part = replace(
            left_over(data, used),
            templates=tuple(chosen.values()),
            workloads=(replace(workload, demand_rps=missing),),
        )
        plan = plan_allocation(part)
        seconds += plan.solve_s
        for planned in plan.replicas:
            counts[numbers[planned.template.id], planned.domain] += planned.count
        for nodes in plan.nodes:
            used[node_key(nodes.offer)] += nodes.count
        missing = plan.services[0].short_rps
    return plan_of(data, counts, used, seconds)


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
    return template.combination[0][0].rsplit(" x", 1)[0]

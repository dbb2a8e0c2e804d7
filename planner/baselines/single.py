"""Single: each workload on its one cheapest instance type in one domain, on demand.

What a team without a planner does: single-node replicas, either aggregated or prefill and decode
on the same type. Of the types that serve the whole demand the cheapest; where none does, the one
that serves most.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, node_key
from planner.baselines.sequential import Orders, plan_in_orders, plan_of
from planner.types import Market, Offer, Phase


def plan_single(data: AllocationInput) -> Orders:
    """Plans of several orders."""
    offers = tuple(offer for offer in data.offers if offer.market is Market.ON_DEMAND)
    templates = tuple(t for t in data.templates if t.nodes == 1)
    return plan_in_orders(replace(data, offers=offers, templates=templates), _plan_one)


def _plan_one(data: AllocationInput) -> Plan:
    workload = data.workloads[0]
    best: tuple[tuple[float, float], Offer, dict[int, int]] | None = None
    for offer in data.offers:
        if not data.may_serve(workload.name, offer.domain):
            continue
        largest = data.rules_of(workload.name).largest_domain_share * workload.demand_rps
        for replicas, served in _choices(data, offer, largest):
            nodes = sum(replicas.values())
            quality = (-round(served, 9), nodes * offer.price_usd_per_hour)
            if nodes and (best is None or quality < best[0]):
                best = (quality, offer, replicas)
    counts: Counter[tuple[int, str]] = Counter()
    used: Counter[tuple[str, str, Market]] = Counter()
    if best is not None:
        _, offer, replicas = best
        counts.update({(index, offer.domain): count for index, count in replicas.items()})
        used[node_key(offer)] = sum(replicas.values())
    return plan_of(data, counts, used, 0.0)


def _choices(
    data: AllocationInput, offer: Offer, demand_rps: float
) -> list[tuple[dict[int, int], float]]:
    """Replicas by template on nodes of one offer, and what they serve."""
    name = data.workloads[0].name
    best: dict[Phase, tuple[int, float]] = {}
    for index, template in enumerate(data.templates):
        rps = template.serves.get(name, 0.0)
        fits = template.combination == ((offer.node_class, 1),)
        if fits and rps > best.get(template.phase, (0, 0.0))[1]:
            best[template.phase] = (index, rps)
    found = []
    room = _room(data, offer)
    if Phase.AGGREGATED in best:
        index, rps = best[Phase.AGGREGATED]
        count = min(room, math.ceil(demand_rps / rps - 1e-9))
        found.append(({index: count}, min(demand_rps, count * rps)))
    if {Phase.PREFILL, Phase.DECODE} <= best.keys():
        (first, prompts), (second, tokens) = best[Phase.PREFILL], best[Phase.DECODE]
        most = min(room - 1, math.ceil(demand_rps / prompts - 1e-9))
        for count in range(1, most + 1):
            rest = min(room - count, math.ceil(min(demand_rps, count * prompts) / tokens - 1e-9))
            served = min(demand_rps, count * prompts, rest * tokens)
            found.append(({first: count, second: rest}, served))
    return found


def _room(data: AllocationInput, offer: Offer) -> int:
    """Nodes that stock, quotas and budget leave."""
    room = offer.stock
    for quota in data.options.quotas:
        if quota.covers(offer) and offer.vcpus:
            room = min(room, quota.vcpus // offer.vcpus)
    budget = data.options.budget_usd_per_hour
    if budget is not None:
        room = min(room, int(budget // offer.price_usd_per_hour))
    return max(0, room)

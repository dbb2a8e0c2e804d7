"""Recheck a plan on its integers (rounding is where mistakes hide), without the solver."""

from __future__ import annotations

from collections import Counter, defaultdict

from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, StockKey, stock_key
from planner.errors import CoralError
from planner.types import Market, Phase

TOLERANCE = 1e-4


class PlanCheckError(CoralError):
    """A plan that the solver returned breaks a constraint: a defect of the solver."""


def check_plan(data: AllocationInput, plan: Plan) -> None:
    """Raise PlanCheckError unless the plan keeps A1, A2 and A4 to A11."""
    _check_nodes(data, plan)
    _check_load(data, plan)
    _check_options(data, plan)


def _check_nodes(data: AllocationInput, plan: Plan) -> None:
    needed: Counter[tuple[str, str]] = Counter()
    for planned in plan.replicas:
        for name, count in planned.template.combination:
            needed[planned.domain, name] += count * planned.count
    rented: Counter[tuple[str, str]] = Counter()
    used: Counter[StockKey] = Counter()
    stock: dict[StockKey, int] = {}
    for offer in data.offers:
        stock[stock_key(offer)] = max(stock.get(stock_key(offer), 0), offer.stock)
    for nodes in plan.nodes:
        offer = nodes.offer
        if nodes.count > offer.stock:
            raise PlanCheckError(
                f"the plan rents {nodes.count} {offer.instance_type} {offer.market} in "
                f"{offer.domain}, of {offer.stock} (A2)"
            )
        rented[offer.domain, offer.node_class] += nodes.count
        used[stock_key(offer)] += nodes.count
    if rented != needed:
        raise PlanCheckError("the plan rents other nodes than its replicas need (A1)")
    for place, count in used.items():
        if count > stock[place]:
            raise PlanCheckError(f"the plan rents {count} {place[1]} in {place[0]}, too many (A2)")


def _check_load(data: AllocationInput, plan: Plan) -> None:
    load: dict[tuple[str, str, Phase], float] = defaultdict(float)
    for planned in plan.replicas:
        if planned.utilization > 1 + TOLERANCE:
            raise PlanCheckError(
                f"template {planned.template.id} in {planned.domain} is overloaded (A4)"
            )
        for name, rps in planned.load_rps.items():
            load[name, planned.domain, planned.template.phase] += rps
            if not data.may_serve(name, planned.domain):
                raise PlanCheckError(f"{name} may not be served in {planned.domain}")
    for service in plan.services:
        name, slack = service.workload, TOLERANCE * (1.0 + service.demand_rps)
        served = 0.0
        for domain in data.domains:
            decode = load[name, domain, Phase.DECODE]
            if abs(load[name, domain, Phase.PREFILL] - decode) > slack:
                raise PlanCheckError(f"{name} in {domain}: prefill and decode differ (A5)")
            here = decode + load[name, domain, Phase.AGGREGATED]
            largest = data.rules_of(name).largest_domain_share
            if here > largest * service.demand_rps + slack:
                raise PlanCheckError(f"{name} in {domain} is more than {largest:.0%} of it (A9)")
            served += here
        if abs(served - service.served_rps) > slack:
            raise PlanCheckError(f"{name} is served other than the plan says (A6)")
        if service.share < data.rules_of(name).least_served - TOLERANCE:
            raise PlanCheckError(f"{name} is served less than it must (A11)")


def _check_options(data: AllocationInput, plan: Plan) -> None:
    options = data.options
    for quota in options.quotas:
        used = sum(n.count * n.offer.vcpus for n in plan.nodes if quota.covers(n.offer))
        if used > quota.vcpus:
            raise PlanCheckError(f"{used} vCPUs are over the {quota.describe()} (A7)")
    rented = [n for n in plan.nodes if n.offer.market is not Market.OWNED]
    gpus = sum(n.count * n.offer.gpus for n in rented)
    spot = sum(n.count * n.offer.gpus for n in rented if n.offer.market is Market.SPOT)
    if spot > options.largest_spot_share * gpus + TOLERANCE:
        raise PlanCheckError(f"{spot} of {gpus} rented GPUs are on spot, too many (A8)")
    budget = options.budget_usd_per_hour
    if budget is not None and plan.cost_usd_per_hour > budget + TOLERANCE:
        raise PlanCheckError(f"${plan.cost_usd_per_hour:.2f}/h is over the budget (A10)")

"""The allocation program: build, with variables numbered and constraints named A0 to A11.

Source: docs/formulation.md, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import pulp

from planner.allocation.limits import (
    Limit,
    budget_limit,
    least_served_limit,
    quota_limit,
    spot_share_limit,
    spread_limit,
    stock_limit,
)
from planner.allocation.options import ANYWHERE, AllocationOptions, ServiceRules
from planner.allocation.options import AllocationSettings as AllocationSettings
from planner.errors import MarketError, NoTemplateError
from planner.types import DISAGGREGATED, Market, Offer, Phase, Template, Workload

NodeKey = tuple[str, str, Market]  # domain, instance type, market
StockKey = tuple[str, str, bool]  # domain, instance type, owned: what shares one stock (A2)
LoadKey = tuple[str, int, str]  # workload, template index, domain


@dataclass(frozen=True, slots=True)
class RunningReplicas:
    """Replicas of one template in one domain that run already."""

    template: Template
    domain: str
    count: int


@dataclass(frozen=True)
class AllocationInput:
    """Everything one allocation depends on, sorted so that the same input gives the same LP."""

    workloads: tuple[Workload, ...]
    templates: tuple[Template, ...]
    offers: tuple[Offer, ...]
    held: Mapping[NodeKey, int] = field(default_factory=dict)  # nodes that already run
    running: tuple[RunningReplicas, ...] = ()
    settings: AllocationSettings = field(default_factory=AllocationSettings)
    options: AllocationOptions = field(default_factory=AllocationOptions)
    rules: Mapping[str, ServiceRules] = field(default_factory=dict)  # by workload

    @classmethod
    def of(
        cls,
        workloads: Sequence[Workload],
        templates: Sequence[Template],
        offers: Sequence[Offer],
        held: Mapping[NodeKey, int] | None = None,
        settings: AllocationSettings | None = None,
        options: AllocationOptions | None = None,
        rules: Mapping[str, ServiceRules] | None = None,
        running: Sequence[RunningReplicas] = (),
    ) -> AllocationInput:
        """Sort and check.

        Raises MarketError: a price that is not a positive number, or two offers of one kind.
        NoTemplateError: a workload with demand has no template that serves it.
        """
        seen: set[NodeKey] = set()
        for offer in offers:
            key = node_key(offer)
            price = offer.price_usd_per_hour
            if offer.market is not Market.OWNED and not (math.isfinite(price) and price > 0):
                raise MarketError(f"offer {_name(offer)}: price must be positive, got {price}")
            if key in seen:
                raise MarketError(f"offer {_name(offer)} is there twice; keep one price of it")
            seen.add(key)
        _require_templates(workloads, templates)
        return cls(
            tuple(sorted(workloads, key=lambda w: w.name)),
            tuple(sorted(templates, key=lambda t: (t.workload, t.phase, t.combination, t.id))),
            tuple(sorted(offers, key=node_key)),
            dict(sorted((held or {}).items())),
            tuple(sorted(running, key=lambda r: (r.template.id, r.domain))),
            settings or AllocationSettings(),
            options or AllocationOptions(),
            dict(rules or {}),
        )

    @property
    def domains(self) -> list[str]:
        return sorted({offer.domain for offer in self.offers})

    def rules_of(self, workload: str) -> ServiceRules:
        return self.rules.get(workload, ANYWHERE)

    def may_serve(self, workload: str, domain: str) -> bool:
        allowed = self.rules_of(workload).domains
        return allowed is None or domain in allowed

    def egress_usd_per_request(self, workload: Workload, domain: str) -> float:
        """What one request's tokens cost on their way out of a domain."""
        if self.rules_of(workload.name).origin in {None, domain}:
            return 0.0
        tokens = workload.lengths.mean_input + workload.lengths.mean_output
        gib = tokens * self.options.bytes_per_token / 2**30
        return gib * self.options.egress_usd_per_gib.get(domain, 0.0)

    def restart_usd(self, template: Template, domain: str) -> float:
        """What ending one replica costs: its nodes' time until another one is loaded (A3)."""
        prices = self._cheapest_rent
        hourly = sum(n * prices.get((domain, name), 0.0) for name, n in template.combination)
        return self.settings.restart_minutes / 60.0 * hourly

    @cached_property
    def _cheapest_rent(self) -> Mapping[tuple[str, str], float]:
        """USD/hour of a rented node by domain and class."""
        prices: dict[tuple[str, str], float] = {}
        for offer in self.offers:
            if offer.market is not Market.OWNED:
                place = (offer.domain, offer.node_class)
                prices[place] = min(prices.get(place, math.inf), offer.price_usd_per_hour)
        return prices

    def without_promises(self) -> AllocationInput:
        """The same without least served shares."""
        rules = {name: replace(rule, least_served=0.0) for name, rule in self.rules.items()}
        return replace(self, rules=rules)

    @property
    def weighted_demand(self) -> float:
        return sum(w.weight * w.demand_rps for w in self.workloads)


@dataclass
class AllocationProblem:
    """The program with the dictionaries that lead from keys to variables and constraints."""

    problem: pulp.LpProblem
    replicas: dict[tuple[int, str], pulp.LpVariable]  # x[t, r]
    nodes: dict[NodeKey, pulp.LpVariable]  # y[r, n, k]
    new_nodes: dict[NodeKey, pulp.LpVariable]
    dropped: dict[NodeKey, pulp.LpVariable]
    ended: list[pulp.LpVariable]  # replicas, in the order of `running`
    load: dict[LoadKey, pulp.LpVariable]  # z[w, t, r], requests/s
    paired: dict[tuple[str, str], pulp.LpVariable]  # q[w, r], requests/s
    served: dict[tuple[str, str], pulp.LpAffineExpression]  # q + aggregated z of (w, r)
    short: dict[str, pulp.LpVariable]  # short[w], requests/s
    limits: dict[str, Limit] = field(default_factory=dict)  # by constraint name
    cost: pulp.LpAffineExpression = field(default_factory=pulp.LpAffineExpression)
    shortfall: pulp.LpAffineExpression = field(default_factory=pulp.LpAffineExpression)


def build_allocation(
    data: AllocationInput, *, enforce_least_served: bool = True
) -> AllocationProblem:
    """Choose replicas and nodes per domain at least cost; the objective is set by the solve.

    Variables  x[t, r] replicas, y[r, n, k] nodes, integer >= 0
               newnode[r, n, k], drop[r, n, k] nodes, ended[t, r] replicas, >= 0
               z[w, t, r], q[w, r], short[w] requests/s, >= 0
    Cost       H sum price y + start-up sum price newnode + drain sum price drop
               + restart sum price ended + H sum egress (q + aggregated z)     (A0) USD
    Such that  sum count[t, c] x[t, r] = sum of y[r, n, k] with n of class c   (A1) nodes
               y <= stock of its offer, y spot + y on-demand <= the larger one (A2) nodes
               newnode >= y - held, drop >= held - y, ended >= running - x     (A3) nodes
               sum over w of z[w, t, r] / T[t, w] <= x[t, r]                   (A4) replicas
               q[w, r] <= sum of z over prefill, and over decode, templates    (A5) requests/s
               sum over r of q + aggregated z, + short[w] >= demand[w]         (A6) requests/s
               vcpus of y <= quota                                             (A7) vCPUs
               GPUs of y spot <= share x GPUs of y rented                      (A8) GPUs
               q + aggregated z of (w, r) <= share x demand[w]                 (A9) requests/s
               sum price y <= budget                                           (A10) USD/hour
               short[w] <= (1 - least served) demand[w]                        (A11) requests/s
    Source     docs/formulation.md, section 5
    """
    allocation = _variables(data)
    problem = allocation.problem
    _nodes_cover_replicas(allocation, data)
    _stock(allocation, data)
    for index, (key, variable) in enumerate(allocation.nodes.items()):
        held = data.held.get(key, 0)
        problem += allocation.new_nodes[key] >= variable - held, f"A3_new_{index}"
        problem += allocation.dropped[key] >= held - variable, f"A3_drop_{index}"
    for index, (running, variable) in enumerate(zip(data.running, allocation.ended, strict=True)):
        kept = _kept(allocation, data, running)
        problem += variable + kept >= running.count, f"A3_ended_{index}"
    _load_fits_replicas(allocation, data)
    _demand(allocation, data)
    _options(allocation, data)
    if enforce_least_served:
        _least_served(allocation, data)
    _objectives(allocation, data)
    return allocation


def node_key(offer: Offer) -> NodeKey:
    """What identifies the nodes of an offer."""
    return (offer.domain, offer.instance_type, offer.market)


def stock_key(offer: Offer) -> StockKey:
    """What identifies the stock that an offer draws on."""
    return (offer.domain, offer.instance_type, offer.market is Market.OWNED)


def _variables(data: AllocationInput) -> AllocationProblem:
    classes = {r: {o.node_class for o in data.offers if o.domain == r} for r in data.domains}
    names = {workload.name for workload in data.workloads}
    replicas: dict[tuple[int, str], pulp.LpVariable] = {}
    load: dict[LoadKey, pulp.LpVariable] = {}
    for index, template in enumerate(data.templates):
        served = {w: rps for w, rps in template.serves.items() if w in names and rps > 0}
        for r_index, domain in enumerate(data.domains):
            fits = all(name in classes[domain] for name, _ in template.combination)
            allowed = [w for w in sorted(served) if data.may_serve(w, domain)]
            if fits and allowed:
                label = f"{index}_{r_index}"
                replicas[index, domain] = pulp.LpVariable(
                    f"replicas_{label}", 0, None, pulp.LpInteger
                )
                for w_index, workload in enumerate(allowed):
                    load[workload, index, domain] = pulp.LpVariable(f"load_{label}_{w_index}", 0)
    keys = [node_key(offer) for offer in data.offers]
    return AllocationProblem(
        problem=pulp.LpProblem("allocation", pulp.LpMinimize),
        replicas=replicas,
        nodes={k: pulp.LpVariable(f"nodes_{i}", 0, offer.stock, pulp.LpInteger)
               for i, (k, offer) in enumerate(zip(keys, data.offers, strict=True))},
        new_nodes={k: pulp.LpVariable(f"newnode_{i}", 0) for i, k in enumerate(keys)},
        dropped={k: pulp.LpVariable(f"drop_{i}", 0) for i, k in enumerate(keys)},
        ended=[pulp.LpVariable(f"ended_{i}", 0) for i in range(len(data.running))],
        load=load,
        paired={},
        served={},
        short={},
    )  # fmt: skip


def _kept(
    allocation: AllocationProblem, data: AllocationInput, running: RunningReplicas
) -> pulp.LpAffineExpression:
    """Replicas of a running template that the plan has."""
    ids = [template.id for template in data.templates]
    index = ids.index(running.template.id) if running.template.id in ids else -1
    return pulp.lpSum(
        [v] if (v := allocation.replicas.get((index, running.domain))) is not None else []
    )


def _nodes_cover_replicas(allocation: AllocationProblem, data: AllocationInput) -> None:
    needed: dict[tuple[str, str], list[tuple[pulp.LpVariable, int]]] = {}
    for (index, domain), variable in allocation.replicas.items():
        for name, count in data.templates[index].combination:
            needed.setdefault((domain, name), []).append((variable, count))
    rented: dict[tuple[str, str], list[pulp.LpVariable]] = {}
    for offer in data.offers:
        variable = allocation.nodes[node_key(offer)]
        rented.setdefault((offer.domain, offer.node_class), []).append(variable)
    for row, (place, variables) in enumerate(sorted(rented.items())):
        use = pulp.LpAffineExpression(needed.get(place, []))
        allocation.problem += use - pulp.lpSum(variables) == 0, f"A1_nodes_{row}"


def _stock(allocation: AllocationProblem, data: AllocationInput) -> None:
    shared: dict[StockKey, list[Offer]] = {}
    for offer in data.offers:
        shared.setdefault(stock_key(offer), []).append(offer)
    for row, ((_, _, owned), offers) in enumerate(sorted(shared.items())):
        kind = "owned" if owned else "stock"
        stock = max(offer.stock for offer in offers)
        used = pulp.lpSum(allocation.nodes[node_key(offer)] for offer in offers)
        label = f"A2_{kind}_{row}"
        allocation.problem += used <= stock, label
        allocation.limits[label] = stock_limit(offers[0], stock)


def _load_fits_replicas(allocation: AllocationProblem, data: AllocationInput) -> None:
    by_replica: dict[tuple[int, str], list[tuple[pulp.LpVariable, float]]] = {}
    for (workload, index, domain), variable in allocation.load.items():
        throughput = data.templates[index].serves[workload]
        by_replica.setdefault((index, domain), []).append((variable, 1.0 / throughput))
    for row, (key, terms) in enumerate(by_replica.items()):
        busy = pulp.LpAffineExpression(terms)
        allocation.problem += busy <= allocation.replicas[key], f"A4_load_{row}"


def _demand(allocation: AllocationProblem, data: AllocationInput) -> None:
    by_place: dict[tuple[str, str, Phase], list[pulp.LpVariable]] = {}
    for (name, index, domain), variable in allocation.load.items():
        by_place.setdefault((name, domain, data.templates[index].phase), []).append(variable)
    for w_index, workload in enumerate(data.workloads):
        for r_index, domain in enumerate(data.domains):
            paired = pulp.LpVariable(f"paired_{w_index}_{r_index}", 0)  # q[w, r]
            for phase in DISAGGREGATED:
                capacity = pulp.lpSum(by_place.get((workload.name, domain, phase), []))
                label = f"A5_{phase.value}_{w_index}_{r_index}"
                allocation.problem += capacity >= paired, label
            mixed = by_place.get((workload.name, domain, Phase.AGGREGATED), [])
            allocation.paired[workload.name, domain] = paired
            allocation.served[workload.name, domain] = pulp.lpSum([paired, *mixed])
        missing = pulp.LpVariable(f"short_{w_index}", 0, workload.demand_rps)
        served = pulp.lpSum(allocation.served[workload.name, d] for d in data.domains)
        allocation.problem += served + missing >= workload.demand_rps, f"A6_demand_{w_index}"
        allocation.short[workload.name] = missing


def _options(allocation: AllocationProblem, data: AllocationInput) -> None:
    problem, nodes, options = allocation.problem, allocation.nodes, data.options
    for index, quota in enumerate(options.quotas):
        covered = [offer for offer in data.offers if quota.covers(offer)]
        used = pulp.lpSum(offer.vcpus * nodes[node_key(offer)] for offer in covered)
        label = f"A7_quota_{index}"
        problem += used <= quota.vcpus, label
        allocation.limits[label] = quota_limit(quota, data.offers)
    rented = [offer for offer in data.offers if offer.market is not Market.OWNED]
    share = options.largest_spot_share
    if share < 1.0:
        weights = {node_key(o): o.gpus * ((o.market is Market.SPOT) - share) for o in rented}
        problem += pulp.lpSum(w * nodes[k] for k, w in weights.items()) <= 0, "A8_spot_share"
        allocation.limits["A8_spot_share"] = spot_share_limit(share, rented)
    for w_index, workload in enumerate(data.workloads):
        largest = data.rules_of(workload.name).largest_domain_share
        if largest < 1.0:
            for r_index, domain in enumerate(data.domains):
                amount = largest * workload.demand_rps
                label = f"A9_spread_{w_index}_{r_index}"
                problem += allocation.served[workload.name, domain] <= amount, label
                allocation.limits[label] = spread_limit(workload, largest, domain)
    if options.budget_usd_per_hour is not None:
        budget = options.budget_usd_per_hour
        spent = pulp.lpSum(o.price_usd_per_hour * nodes[node_key(o)] for o in rented)
        problem += spent <= budget, "A10_budget"
        allocation.limits["A10_budget"] = budget_limit(budget, rented)


def _least_served(allocation: AllocationProblem, data: AllocationInput) -> None:
    for index, workload in enumerate(data.workloads):
        least = data.rules_of(workload.name).least_served
        if least > 0.0:
            limit = least_served_limit(workload, least)
            label = f"A11_least_served_{index}"
            allocation.problem += allocation.short[workload.name] <= limit.amount, label
            allocation.limits[label] = limit


def _objectives(allocation: AllocationProblem, data: AllocationInput) -> None:
    settings = data.settings
    hours = settings.horizon_hours
    terms = []
    for offer in data.offers:
        key, price = node_key(offer), offer.price_usd_per_hour
        terms.append(hours * price * allocation.nodes[key])
        terms.append(settings.startup_minutes / 60.0 * price * allocation.new_nodes[key])
        terms.append(settings.drain_minutes / 60.0 * price * allocation.dropped[key])
    for running, ended in zip(data.running, allocation.ended, strict=True):
        terms.append(data.restart_usd(running.template, running.domain) * ended)
    for workload in data.workloads:
        for domain in data.domains:
            egress = data.egress_usd_per_request(workload, domain)
            if egress:
                terms.append(3600.0 * hours * egress * allocation.served[workload.name, domain])
    allocation.cost = pulp.lpSum(terms)
    allocation.shortfall = pulp.lpSum(w.weight * allocation.short[w.name] for w in data.workloads)


def _require_templates(workloads: Sequence[Workload], templates: Sequence[Template]) -> None:
    known = {(name, t.phase) for t in templates for name, rps in t.serves.items() if rps > 0}
    for workload in workloads:
        missing = [phase for phase in DISAGGREGATED if (workload.name, phase) not in known]
        if workload.demand_rps > 0 and missing and (workload.name, Phase.AGGREGATED) not in known:
            raise NoTemplateError(
                f"workload {workload.name!r} has demand but the library has no {missing[0]} "
                "template for it; build the library with node classes that can serve it"
            )


def _name(offer: Offer) -> str:
    return f"{offer.domain} {offer.instance_type} {offer.market}"

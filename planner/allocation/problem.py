"""The allocation program: build, with variables numbered and constraints named A0 to A6.

Source: docs/formulation.md, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pulp

from planner.allocation.plan import Plan
from planner.errors import MarketError, NoTemplateError
from planner.types import Market, Offer, Phase, Template, Workload

NodeKey = tuple[str, str, Market]  # domain, instance type, market


@dataclass(frozen=True, slots=True)
class AllocationSettings:
    """Horizon and initialisation cost of A0, and when the solver stops."""

    horizon_hours: float = 1.0
    startup_minutes: float = 10.0  # a new node is paid for, but serves nothing, for so long
    relative_gap: float = 0.005
    deadline_s: float = 60.0


@dataclass(frozen=True)
class AllocationInput:
    """Everything one allocation depends on, sorted so that the same input gives the same LP."""

    workloads: tuple[Workload, ...]
    templates: tuple[Template, ...]
    offers: tuple[Offer, ...]
    held: Mapping[NodeKey, int] = field(default_factory=dict)  # nodes that already run
    settings: AllocationSettings = AllocationSettings()

    @classmethod
    def of(
        cls,
        workloads: Sequence[Workload],
        templates: Sequence[Template],
        offers: Sequence[Offer],
        held: Mapping[NodeKey, int] | None = None,
        settings: AllocationSettings | None = None,
    ) -> AllocationInput:
        """Sort and check.

        Raises MarketError: a price that is not a positive number, or two offers of one kind.
        NoTemplateError: a workload with demand has no template of some phase.
        """
        seen: set[NodeKey] = set()
        for offer in offers:
            key = node_key(offer)
            price = offer.price_usd_per_hour
            if not (math.isfinite(price) and price > 0):
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
            settings or AllocationSettings(),
        )


@dataclass(frozen=True)
class AllocationProblem:
    """The program with the dictionaries that lead from keys to variables and constraints."""

    problem: pulp.LpProblem
    replicas: Mapping[tuple[int, str], pulp.LpVariable]  # x[t, r]
    nodes: Mapping[NodeKey, pulp.LpVariable]  # y[r, n, k]
    new_nodes: Mapping[NodeKey, pulp.LpVariable]
    load: Mapping[tuple[str, int, str], pulp.LpVariable]  # z[w, t, r], requests/s
    paired: Mapping[tuple[str, str], pulp.LpVariable]  # q[w, r], requests/s
    short: Mapping[str, pulp.LpVariable]  # short[w], requests/s
    cost: pulp.LpAffineExpression  # A0 without the penalty, USD over the horizon
    shortfall: pulp.LpAffineExpression  # sum of weight x short
    stock_rows: Mapping[tuple[str, str], str]  # (domain, instance type) -> constraint name


def build_allocation(data: AllocationInput) -> AllocationProblem:
    """Choose replicas and nodes per domain at least cost; the objective is set by the solve.

    Variables  x[t, r] replicas, y[r, n, k] nodes, newnode[r, n, k], integer >= 0
               z[w, t, r], q[w, r], short[w] requests/s, >= 0
    Cost       H sum price y + sum init_cost newnode                           (A0) USD
    Such that  sum count[t, c] x[t, r] = sum of y[r, n, k] with n of class c   (A1) nodes
               sum over k of y[r, n, k] <= stock[r, n]                         (A2) nodes
               newnode[r, n, k] >= y[r, n, k] - held[r, n, k]                  (A3) nodes
               z[w, t, r] <= T[t, w] x[t, r]                                   (A4) requests/s
               q[w, r] <= sum of z over prefill, and over decode, templates    (A5) requests/s
               sum over r of q[w, r] + short[w] >= demand[w]                   (A6) requests/s
    Source     docs/formulation.md, section 5
    """
    problem = pulp.LpProblem("allocation", pulp.LpMinimize)
    domains = sorted({offer.domain for offer in data.offers})
    classes = {r: {o.node_class for o in data.offers if o.domain == r} for r in domains}
    replicas: dict[tuple[int, str], pulp.LpVariable] = {}
    load: dict[tuple[str, int, str], pulp.LpVariable] = {}
    for index, template in enumerate(data.templates):
        for r_index, domain in enumerate(domains):
            if all(name in classes[domain] for name, _ in template.combination):
                label = f"{index}_{r_index}"
                replicas[index, domain] = pulp.LpVariable(
                    f"replicas_{label}", 0, None, pulp.LpInteger
                )
                load[template.workload, index, domain] = pulp.LpVariable(f"load_{label}", 0)
    nodes = {
        node_key(offer): pulp.LpVariable(f"nodes_{i}", 0, None, pulp.LpInteger)
        for i, offer in enumerate(data.offers)
    }
    new_nodes = {
        node_key(offer): pulp.LpVariable(f"newnode_{i}", 0) for i, offer in enumerate(data.offers)
    }
    _nodes_cover_replicas(problem, data, replicas, nodes)
    stock_rows = _stock(problem, data, nodes)
    for index, (key, variable) in enumerate(nodes.items()):
        held = data.held.get(key, 0)
        problem += new_nodes[key] >= variable - held, f"A3_new_{index}"
    for row, ((_, index, domain), variable) in enumerate(load.items()):
        throughput = data.templates[index].throughput_rps
        problem += variable <= throughput * replicas[index, domain], f"A4_load_{row}"
    paired, short = _demand(problem, data, domains, load)
    settings = data.settings
    startup_hours = settings.startup_minutes / 60.0
    cost = pulp.lpSum(
        settings.horizon_hours * offer.price_usd_per_hour * nodes[node_key(offer)]
        + startup_hours * offer.price_usd_per_hour * new_nodes[node_key(offer)]
        for offer in data.offers
    )
    shortfall = pulp.lpSum(workload.weight * short[workload.name] for workload in data.workloads)
    return AllocationProblem(
        problem, replicas, nodes, new_nodes, load, paired, short, cost, shortfall, stock_rows
    )


def set_values(allocation: AllocationProblem, data: AllocationInput, plan: Plan) -> None:
    """Give the variables a plan's values, for the solver to start from."""
    counts = {(planned.template.id, planned.domain): planned for planned in plan.replicas}
    for (index, domain), variable in allocation.replicas.items():
        planned = counts.get((data.templates[index].id, domain))
        variable.varValue = planned.count if planned else 0
    for (_, index, domain), variable in allocation.load.items():
        planned = counts.get((data.templates[index].id, domain))
        variable.varValue = planned.load_rps if planned else 0.0
    for (workload, domain), variable in allocation.paired.items():
        variable.varValue = sum(
            planned.load_rps
            for planned in plan.replicas
            if (planned.template.workload, planned.domain) == (workload, domain)
            and planned.template.phase is Phase.PREFILL
        )
    rented = {node_key(planned.offer): planned for planned in plan.nodes}
    for key, variable in allocation.nodes.items():
        variable.varValue = rented[key].count if key in rented else 0
        allocation.new_nodes[key].varValue = rented[key].new if key in rented else 0
    for service in plan.services:
        allocation.short[service.workload].varValue = service.short_rps


def node_key(offer: Offer) -> NodeKey:
    """What identifies the nodes of an offer."""
    return (offer.domain, offer.instance_type, offer.market)


def _nodes_cover_replicas(
    problem: pulp.LpProblem,
    data: AllocationInput,
    replicas: Mapping[tuple[int, str], pulp.LpVariable],
    nodes: Mapping[NodeKey, pulp.LpVariable],
) -> None:
    needed: dict[tuple[str, str], list[tuple[pulp.LpVariable, int]]] = {}
    for (index, domain), variable in replicas.items():
        for name, count in data.templates[index].combination:
            needed.setdefault((domain, name), []).append((variable, count))
    rented: dict[tuple[str, str], list[pulp.LpVariable]] = {}
    for offer in data.offers:
        rented.setdefault((offer.domain, offer.node_class), []).append(nodes[node_key(offer)])
    for row, (place, variables) in enumerate(sorted(rented.items())):
        use = pulp.LpAffineExpression(needed.get(place, []))
        problem += use - pulp.lpSum(variables) == 0, f"A1_nodes_{row}"


def _stock(
    problem: pulp.LpProblem, data: AllocationInput, nodes: Mapping[NodeKey, pulp.LpVariable]
) -> dict[tuple[str, str], str]:
    shared: dict[tuple[str, str], list[Offer]] = {}
    for offer in data.offers:
        shared.setdefault((offer.domain, offer.instance_type), []).append(offer)
    rows = {}
    for row, (place, offers) in enumerate(sorted(shared.items())):
        name = rows[place] = f"A2_stock_{row}"
        stock = max(offer.stock for offer in offers)
        problem += pulp.lpSum(nodes[node_key(offer)] for offer in offers) <= stock, name
    return rows


def _demand(
    problem: pulp.LpProblem,
    data: AllocationInput,
    domains: Sequence[str],
    load: Mapping[tuple[str, int, str], pulp.LpVariable],
) -> tuple[dict[tuple[str, str], pulp.LpVariable], dict[str, pulp.LpVariable]]:
    by_place: dict[tuple[str, str, Phase], list[pulp.LpVariable]] = {}
    for (name, index, domain), variable in load.items():
        place = (name, domain, data.templates[index].phase)
        by_place.setdefault(place, []).append(variable)
    pairs: dict[tuple[str, str], pulp.LpVariable] = {}
    short = {}
    for w_index, workload in enumerate(data.workloads):
        served = []
        for r_index, domain in enumerate(domains):
            paired = pulp.LpVariable(f"paired_{w_index}_{r_index}", 0)  # q[w, r]
            for phase in Phase:
                capacity = pulp.lpSum(by_place.get((workload.name, domain, phase), []))
                problem += capacity >= paired, f"A5_{phase.value}_{w_index}_{r_index}"
            pairs[workload.name, domain] = paired
            served.append(paired)
        missing = pulp.LpVariable(f"short_{w_index}", 0, workload.demand_rps)
        problem += pulp.lpSum(served) + missing >= workload.demand_rps, f"A6_demand_{w_index}"
        short[workload.name] = missing
    return pairs, short


def _require_templates(workloads: Sequence[Workload], templates: Sequence[Template]) -> None:
    known = {(template.workload, template.phase) for template in templates}
    for workload in workloads:
        for phase in Phase:
            if workload.demand_rps > 0 and (workload.name, phase) not in known:
                raise NoTemplateError(
                    f"workload {workload.name!r} has demand but the library has no {phase} "
                    "template for it; build the library with node classes that can serve it"
                )


def _name(offer: Offer) -> str:
    return f"{offer.domain} {offer.instance_type} {offer.market}"

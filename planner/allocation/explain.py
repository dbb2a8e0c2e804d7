"""Why a plan is as it is: what each workload costs, which offers would enter and at what price.

Source: docs/formulation.md, section 5.4 (pricing of the linear relaxation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.allocation.assemble import shortfall_tolerance
from planner.allocation.columns import limited
from planner.allocation.model import AllocationModel
from planner.allocation.plan import Plan, PlannedReplicas
from planner.allocation.problem import AllocationInput, node_key
from planner.allocation.relaxation import Relaxation, best_loads, relax
from planner.errors import UnknownNameError
from planner.perf.grids import Floats
from planner.programs import Rows
from planner.types import Market, Offer, gpu_of

MOST_STEPS = 30
PRECISION = 1e-7  # of today's price


@dataclass(frozen=True, slots=True)
class EntryPrice:
    """The price of an unused offer below which it would be rented."""

    offer: Offer
    usd_per_hour: float  # zero: not at any price

    @property
    def share(self) -> float:
        """Of today's price."""
        return self.usd_per_hour / self.offer.price_usd_per_hour


def without_gpu(data: AllocationInput, gpu: str) -> AllocationInput:
    """The same input where nobody offers a GPU type, on whatever node class.

    Raises UnknownNameError: no offer has that GPU.
    """
    offers = tuple(o for o in data.offers if gpu_of(o.node_class) != gpu)
    if len(offers) == len(data.offers):
        raise UnknownNameError("GPU", gpu, {gpu_of(o.node_class) for o in data.offers}, "the plan")
    return replace(data, offers=offers)


def cost_by_workload(plan: Plan) -> Mapping[str, float]:
    """USD/hour of the nodes by workload; a shared replica's by the time each one keeps it busy."""
    costs = {service.workload: 0.0 for service in plan.services}
    for planned in plan.replicas:
        usd_per_hour, serves = replica_cost(plan, planned), planned.template.serves
        busy = {name: rps / serves[name] for name, rps in planned.load_rps.items()}
        total = sum(busy.values())
        if total <= 0.0:
            costs[planned.template.workload] += usd_per_hour
            continue
        for name, share in busy.items():
            costs[name] += usd_per_hour * share / total
    return costs


def replica_cost(plan: Plan, planned: PlannedReplicas) -> float:
    """USD/hour of some replicas' nodes, at the mean price of their class in the domain."""
    total = 0.0
    for name, count in planned.template.combination:
        rented = [
            nodes
            for nodes in plan.nodes
            if nodes.offer.domain == planned.domain and nodes.offer.node_class == name
        ]
        price = sum(n.cost_usd_per_hour for n in rented) / sum(n.count for n in rented)
        total += price * count * planned.count
    return total


def entry_prices(data: AllocationInput, plan: Plan) -> tuple[EntryPrice, ...]:
    """Of every GPU type that the plan does not rent, the offer that would enter first.

    Prices at which the linear relaxation, at the plan's own shortfall, begins to rent it; rounding
    to whole replicas can move that by a little. Nearest to today's price first.
    """
    search = _EntrySearch(data, plan)
    used = {gpu_of(nodes.offer.node_class) for nodes in plan.nodes}
    by_gpu: dict[str, list[tuple[float, int]]] = {}
    for number, offer in enumerate(data.offers):
        if offer.market is not Market.OWNED and gpu_of(offer.node_class) not in used:
            most = search.most_share[number]
            by_gpu.setdefault(gpu_of(offer.node_class), []).append((most, number))
    found = []
    for candidates in by_gpu.values():
        best: EntryPrice | None = None
        for most, number in sorted(candidates, reverse=True):
            if best is not None and most <= best.share:
                break  # not even its bound is nearer
            entry = search.entry(number)
            if best is None or entry.share > best.share:
                best = entry
        if best is not None:
            found.append(best)
    return tuple(sorted(found, key=lambda e: (-e.share, node_key(e.offer))))


class _EntrySearch:
    """The relaxation at a plan's shortfall, and the entry prices of single offers."""

    def __init__(self, data: AllocationInput, plan: Plan) -> None:
        self.data, self.model = data, AllocationModel(data)
        short = plan.weighted_shortfall + shortfall_tolerance(data)
        model = self.model
        self.program = limited(model.fulfilling(model.program.cost), model, short)
        least = relax(model, model.fulfilling(model.shortfall))
        used = model.values_of(plan)[model.parts.replicas] > 0.5  # feasible without the others
        pool = np.union1d(least.pool, model.parts.replicas[used])
        self.relaxation = relax(model, self.program, pool)
        self.most_share = self._most_shares()

    def entry(self, number: int) -> EntryPrice:
        """By Newton's method from a price of zero on: the optimum is concave in a price.

        At every price the nodes that are rented are the slope; it meets the optimum without the
        offer at most at the entry price, so the steps never pass that.
        """
        offer, column = self.data.offers[number], self.model.parts.nodes[number]
        hours, price, pool = self._hours(number), 0.0, self.relaxation.pool
        without = self._at(column, np.inf, pool).objective
        for _ in range(MOST_STEPS):
            answer = self._at(column, hours * price, pool)
            pool = answer.pool
            nodes = float(answer.values[column])
            step = max(0.0, without - answer.objective) / (hours * nodes) if nodes > 0 else 0.0
            price += step
            if step <= PRECISION * offer.price_usd_per_hour:
                break
        return EntryPrice(offer, min(price, offer.price_usd_per_hour))

    def _at(self, column: int, cost: float, pool: Rows) -> Relaxation:
        """The relaxation at another cost of one offer's nodes; not rented at all at infinity."""
        program, costs = self.program, self.program.cost.copy()
        upper = program.upper
        if np.isfinite(cost):
            costs[column] = cost
        else:
            upper = upper.copy()
            upper[column] = 0.0
        return relax(self.model, replace(program, cost=costs, upper=upper), pool)

    def _hours(self, number: int) -> float:
        """What a node costs over the horizon, in hours of its price."""
        settings = self.data.settings
        if self.data.held.get(node_key(self.data.offers[number]), 0):
            return settings.horizon_hours
        return settings.horizon_hours + settings.startup_minutes / 60.0

    def _most_shares(self) -> list[float]:
        """A bound of every offer's entry price over today's, from the relaxation's prices.

        A replica pays once its reduced cost is zero; with nodes at their own cost (a rented one's
        is its price at the margin) that is a saving per node that the entry price must give.
        """
        model, duals = self.model, self.relaxation.duals
        reduced = self.program.cost - self.program.matrix.T @ duals
        rows = model.node_rows.ravel()
        own = reduced[model.parts.nodes] - duals[rows[model.place]]
        values = np.full(model.available.size, np.inf)
        np.minimum.at(values, model.place, own)
        saving = self._savings(reduced, np.where(np.isfinite(values), values, 0.0) + duals[rows])
        shares = []
        for number, offer in enumerate(self.data.offers):
            place = model.place[number]
            cheaper = (own[number] - values[place] + saving[place]) / self._hours(number)
            rent = offer.price_usd_per_hour
            shares.append(max(0.0, 1.0 - cheaper / rent) if rent > 0 else 0.0)
        return shares

    def _savings(self, reduced: Floats, change: Floats) -> Floats:
        """Of every place, what one of its nodes must cost less for some replica to pay."""
        model = self.model
        x, z, shape = model.parts.replicas, model.parts.load, model.available.shape
        w = model.workload[z]
        most = model.largest_rps[w, model.domain[z]]
        rates = np.minimum(model.rates[model.template[z], w], most)
        counts = model.counts[model.template[x]]
        priced = reduced[x] + best_loads(model, reduced, rates)
        priced += (counts * change.reshape(shape)[model.domain[x]]).sum(axis=1)
        replica, node = np.nonzero(counts)
        saving = np.full(shape, np.inf)
        np.minimum.at(
            saving,
            (model.domain[x[replica]], node),
            np.maximum(priced[replica], 0.0) / counts[replica, node],
        )
        return saving.ravel()

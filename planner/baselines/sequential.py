"""Planners that take one workload after another on what the others left.

This is how the systems that Coral is compared with plan several models; each workload's own plan is
solved to its optimum all the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from planner.allocation.assemble import Steps, assemble, planned_nodes
from planner.allocation.plan import Plan, Worth
from planner.allocation.problem import (
    AllocationInput,
    NodeKey,
    StockKey,
    node_key,
    stock_key,
)
from planner.baselines.homo_joint import better_of
from planner.solver import Outcome, SolveReport
from planner.types import Workload

MOST_ORDERS = 6

PlanOne = Callable[[AllocationInput], Plan]  # of an input with one workload


@dataclass(frozen=True)
class Orders:
    """One plan per order of the workloads."""

    plans: tuple[Plan, ...]

    @property
    def best(self) -> Plan:
        return reduce(better_of, self.plans)

    @property
    def worst(self) -> Plan:
        return reduce(lambda a, b: a if better_of(a, b) is b else b, self.plans)

    @property
    def mean_served_share(self) -> float:
        return sum(plan.served_share for plan in self.plans) / len(self.plans)


def orders_of(workloads: Sequence[Workload]) -> list[tuple[Workload, ...]]:
    """All orders of up to three workloads; of more, every rotation of one."""
    if len(workloads) <= 3:
        return list(itertools.permutations(workloads))
    turns = [tuple(workloads[n:]) + tuple(workloads[:n]) for n in range(len(workloads))]
    step = -(-len(turns) // MOST_ORDERS)
    return turns[::step]


def plan_in_orders(data: AllocationInput, plan_one: PlanOne) -> Orders:
    """Plans of every order of `orders_of`."""
    return Orders(tuple(plan_sequentially(data, o, plan_one) for o in orders_of(data.workloads)))


def plan_sequentially(data: AllocationInput, order: Sequence[Workload], plan_one: PlanOne) -> Plan:
    """Each workload by itself on the stock, quotas and budget that are left.

    Least served shares are not promised: who comes last may find nothing.
    """
    parts = PartPlans(data.without_promises())
    for workload in order:
        templates = tuple(t for t in data.templates if t.serves.get(workload.name, 0.0) > 0)
        left = parts.left_over()
        parts.add(plan_one(replace(left, workloads=(workload,), templates=templates)))
    return parts.plan()


class PartPlans:
    """Plans of parts of an input, added up."""

    def __init__(self, data: AllocationInput) -> None:
        self.data = data
        self._numbers = {template.id: index for index, template in enumerate(data.templates)}
        self._counts: Counter[tuple[int, str]] = Counter()
        self._used: Counter[NodeKey] = Counter()
        self._seconds = 0.0

    def add(self, plan: Plan) -> None:
        self._seconds += plan.solve_s
        for planned in plan.replicas:
            self._counts[self._numbers[planned.template.id], planned.domain] += planned.count
        for nodes in plan.nodes:
            self._used[node_key(nodes.offer)] += nodes.count

    def left_over(self) -> AllocationInput:
        """The input on what no part has taken."""
        return _left_over(self.data, self._used)

    def plan(self) -> Plan:
        return plan_of(self.data, self._counts, self._used, self._seconds)


def _left_over(data: AllocationInput, used: Counter[NodeKey]) -> AllocationInput:
    """The input without the nodes that are taken already."""
    by_key = {node_key(offer): offer for offer in data.offers}
    taken: Counter[StockKey] = Counter()
    for key, count in used.items():
        taken[stock_key(by_key[key])] += count
    most: dict[StockKey, int] = {}  # of both markets together (A2)
    for offer in data.offers:
        most[stock_key(offer)] = max(most.get(stock_key(offer), 0), offer.stock)
    offers = tuple(
        replace(
            o,
            stock=min(o.stock - used[node_key(o)], most[stock_key(o)] - taken[stock_key(o)]),
        )
        for o in data.offers
    )
    spent = sum(by_key[key].price_usd_per_hour * count for key, count in used.items())
    options = replace(
        data.options,
        quotas=tuple(
            replace(
                quota,
                vcpus=quota.vcpus
                - sum(by_key[k].vcpus * n for k, n in used.items() if quota.covers(by_key[k])),
            )
            for quota in data.options.quotas
        ),
        budget_usd_per_hour=None
        if data.options.budget_usd_per_hour is None
        else max(0.0, data.options.budget_usd_per_hour - spent),
    )
    held = {key: max(0, count - used[key]) for key, count in data.held.items()}
    return replace(data, offers=offers, options=options, held=held)


def plan_of(
    data: AllocationInput,
    counts: Counter[tuple[int, str]],
    nodes: Counter[NodeKey],
    seconds: float,
) -> Plan:
    """The checked plan of some replicas and nodes; nothing is proven of it."""
    unproven = SolveReport(Outcome.INCUMBENT, 0.0, 0.0, 0.0)
    chosen = {key: count for key, count in counts.items() if count}
    steps = Steps(unproven, unproven)
    return assemble(data, chosen, planned_nodes(data, nodes), Worth(), steps, seconds)

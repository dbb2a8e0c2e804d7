"""Planners that take one workload after another on what the others left.

This is how the systems that Coral is compared with plan several models; each workload's own plan is
solved to its optimum all the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.allocation.assemble import Steps, assemble, objective_usd, planned_nodes
from planner.allocation.check import check_plan
from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, NodeKey, node_key
from planner.solver import Outcome, SolveReport
from planner.types import Market, Workload

MOST_ORDERS = 6

PlanOne = Callable[[AllocationInput], Plan]  # of an input with one workload


@dataclass(frozen=True)
class Orders:
    """One plan per order of the workloads."""

    plans: tuple[Plan, ...]

    @property
    def best(self) -> Plan:
        return min(self.plans, key=_quality)

    @property
    def worst(self) -> Plan:
        return max(self.plans, key=_quality)

    @property
    def mean_served_share(self) -> float:
        return sum(plan.served_share for plan in self.plans) / len(self.plans)


def _quality(plan: Plan) -> tuple[float, float]:
    return (round(plan.weighted_shortfall, 6), plan.objective_usd)


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
    used: Counter[NodeKey] = Counter()
    counts: Counter[tuple[int, str]] = Counter()
    numbers = {template.id: index for index, template in enumerate(data.templates)}
    seconds = 0.0
    for workload in order:
        templates = tuple(t for t in data.templates if t.serves.get(workload.name, 0.0) > 0)
        alone = replace(
            left_over(data, used),
            workloads=(workload,),
            templates=templates,
            rules={
                name: replace(rule, least_served=0.0)
                for name, rule in data.rules.items()
                if name == workload.name
            },
        )
        plan = plan_one(alone)
        seconds += plan.solve_s
        for planned in plan.replicas:
            counts[numbers[planned.template.id], planned.domain] += planned.count
        for nodes in plan.nodes:
            used[node_key(nodes.offer)] += nodes.count
    return plan_of(data, counts, used, seconds)


def left_over(data: AllocationInput, used: Counter[NodeKey]) -> AllocationInput:
    """The input without the nodes that are taken already."""
    taken: Counter[tuple[str, str, bool]] = Counter()
    for (domain, name, market), count in used.items():
        taken[domain, name, market is Market.OWNED] += count
    offers = tuple(
        replace(o, stock=o.stock - taken[o.domain, o.instance_type, o.market is Market.OWNED])
        for o in data.offers
    )
    by_key = {node_key(offer): offer for offer in data.offers}
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
    lenient = {name: replace(rule, least_served=0.0) for name, rule in data.rules.items()}
    data = replace(data, rules=lenient)
    plan = assemble(
        data, chosen, planned_nodes(data, nodes), (), Steps(unproven, unproven), seconds
    )
    plan = replace(plan, objective_usd=objective_usd(data, plan))
    check_plan(data, plan)
    return plan

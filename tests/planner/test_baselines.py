"""Baselines: what each may do, and that none of them is handicapped or favoured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.allocation.options import AllocationOptions, Quota, ServiceRules
from planner.allocation.problem import AllocationInput
from planner.baselines.cauchy import plan_cauchy
from planner.baselines.homo import plan_homo
from planner.baselines.homo_joint import plan_homo_joint, plan_never_worse
from planner.baselines.sequential import orders_of
from planner.baselines.single import plan_single
from planner.types import Market, Phase
from tests.builders import EXACT, offer, template, workload

PRE, DEC, AGG = Phase.PREFILL, Phase.DECODE, Phase.AGGREGATED
CLASSES = ("A x1", "A x2", "B x1")


def random_input(seed: int) -> AllocationInput:
    """Two workloads, pure and mixed templates of all phases, two domains, some scarce."""
    rng = np.random.default_rng(seed)
    templates = []
    for name in ("chat", "code"):
        for number, counts in enumerate(
            ({"A x1": 1}, {"A x2": 1}, {"B x1": 1}, {"B x1": 2}, {"A x1": 1, "B x1": 1})
        ):
            for phase in (PRE, DEC, AGG):
                if rng.random() < 0.8 or number == 0:
                    rate = float(rng.uniform(0.5, 2.0)) * sum(counts.values())
                    templates.append(
                        template(f"{name}-{phase}-{number}", phase, counts, rate, name)
                    )
    offers = []
    for domain in ("d1", "d2"):
        for node_class in CLASSES:
            price, stock = float(rng.uniform(1.0, 5.0)), int(rng.choice([0, 1, 2, 4, 9]))
            offers.append(offer(domain, node_class, price, stock))
            if rng.random() < 0.5:
                offers.append(offer(domain, node_class, price * 0.5, stock, Market.SPOT))
    workloads = [workload("chat", float(rng.uniform(0, 6))), workload("code", 2.0)]
    return AllocationInput.of(workloads, templates, offers, settings=EXACT)


@pytest.mark.parametrize("seed", range(100))
def test_coral_is_never_worse_than_homo_joint_nor_that_than_homo(seed: int) -> None:
    data = random_input(seed)
    joint = plan_homo_joint(data)
    coral = plan_never_worse(data, joint)
    assert coral.weighted_shortfall <= joint.weighted_shortfall + 1e-5
    if coral.weighted_shortfall > joint.weighted_shortfall - 1e-5:
        assert coral.objective_usd <= joint.objective_usd + 1e-5
    best = plan_homo(data).best
    assert joint.weighted_shortfall <= best.weighted_shortfall + 1e-5
    if joint.weighted_shortfall > best.weighted_shortfall - 1e-5:
        assert joint.objective_usd <= best.objective_usd + 1e-5


@pytest.mark.parametrize("seed", range(20))
def test_baselines_keep_to_their_rules(seed: int) -> None:
    data = random_input(seed)
    for plan in plan_single(data).plans:
        assert all(nodes.offer.market is Market.ON_DEMAND for nodes in plan.nodes)
        for service in plan.services:
            mine = [r for r in plan.replicas if r.template.workload == service.workload]
            assert all(r.template.nodes == 1 for r in mine)
            assert len({(r.domain, r.template.combination) for r in mine}) <= 1
    for plan in plan_cauchy(data).plans:
        assert all(r.template.phase is not AGG for r in plan.replicas)
        assert all(r.template.is_homogeneous for r in plan.replicas)
    for plan in plan_homo(data, max_nodes=1).plans:
        assert all(r.template.nodes == 1 for r in plan.replicas)


def contended() -> AllocationInput:
    """Two workloads, one good node: who comes first takes it."""
    templates = [
        template("chat-a", AGG, {"A x1": 1}, 2.0, "chat"),
        template("chat-b", AGG, {"B x1": 1}, 1.0, "chat"),
        template("code-a", AGG, {"A x1": 1}, 2.0, "code"),
    ]
    offers = [offer("d1", "A x1", 1.0, 1), offer("d1", "B x1", 3.0, 4)]
    workloads = [workload("chat", 2.0), workload("code", 2.0)]
    return AllocationInput.of(workloads, templates, offers, settings=EXACT)


def test_one_after_another_depends_on_the_order() -> None:
    orders = plan_homo(contended())
    assert {round(plan.served_share, 6) for plan in orders.plans} == {0.5, 1.0}
    assert orders.best.served_share == pytest.approx(1.0)
    assert orders.worst.served_share == pytest.approx(0.5)
    assert orders.mean_served_share == pytest.approx(0.75)
    assert plan_homo_joint(contended()).served_share == pytest.approx(1.0)


def test_single_takes_the_cheapest_type_that_serves_everything() -> None:
    data = contended()
    (chat,) = (w for w in data.workloads if w.name == "chat")
    alone = replace(data, workloads=(chat,))
    plan = plan_single(alone).best
    assert [(n.offer.node_class, n.count) for n in plan.nodes] == [("A x1", 1)]
    dearer = replace(alone, workloads=(replace(chat, demand_rps=3.0),))
    plan = plan_single(dearer).best
    assert [(n.offer.node_class, n.count) for n in plan.nodes] == [("B x1", 3)]


def test_cauchy_goes_on_to_the_next_pair_when_the_best_is_used_up() -> None:
    templates = [
        template("pre-a", PRE, {"A x1": 1}, 4.0),
        template("dec-b", DEC, {"B x1": 1}, 1.0),
        template("dec-a", DEC, {"A x1": 1}, 1.0),
    ]
    offers = [offer("d1", "A x1", 2.0, 5), offer("d1", "B x1", 1.0, 2)]
    data = AllocationInput.of([workload("chat", 4.0)], templates, offers, settings=EXACT)
    plan = plan_cauchy(data).best
    used = {n.offer.node_class: n.count for n in plan.nodes}
    assert used["B x1"] == 2  # first pair: prefill on A, decode on B, to the end of the stock
    assert plan.served_share == pytest.approx(1.0)


def test_one_after_another_keeps_quotas_and_budget() -> None:
    quota = AllocationOptions(quotas=(Quota(vcpus=0, instance_types="type-A*"),))
    counted = tuple(replace(o, vcpus=8) for o in contended().offers)
    plan = plan_homo(replace(contended(), offers=counted, options=quota)).best
    assert {n.offer.node_class for n in plan.nodes} <= {"B x1"}
    budget = AllocationOptions(budget_usd_per_hour=4.0)
    for plan in plan_homo(replace(contended(), options=budget)).plans:
        assert plan.cost_usd_per_hour <= 4.0 + 1e-6


def test_a_least_served_share_that_a_baseline_breaks_stops_nothing() -> None:
    rules = {"code": ServiceRules(least_served=1.0)}
    assert plan_homo(replace(contended(), rules=rules)).worst.served_share < 1.0


def test_orders_are_all_of_few_and_turns_of_many() -> None:
    names = [workload(name) for name in "abcd"]
    assert len(orders_of(names[:3])) == 6
    turns = orders_of(names)
    assert len(turns) == 4
    assert {turn[0].name for turn in turns} == set("abcd")
    assert all(len({w.name for w in turn}) == 4 for turn in turns)

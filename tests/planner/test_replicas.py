"""Replicas keep their names and nodes; a fleet that the market no longer offers stays one's own."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.allocation.problem import AllocationInput, RunningReplicas
from planner.allocation.solve import plan_allocation
from planner.leases import Lease, LeaseState, reconcile
from planner.replan import from_fleet, replan
from planner.replicas import Replica, assign, follow, standing
from planner.types import Market, Phase
from tests.builders import EXACT, offer, template, workload

NOW = datetime(2026, 11, 30, tzinfo=UTC)
COUNTS = st.dictionaries(
    st.tuples(st.sampled_from(["t1", "t2"]), st.sampled_from(["d1", "d2"])), st.integers(0, 4)
)
ids = (f"r{number}" for number in itertools.count())


def lease(name: str, node: str = "A x1", domain: str = "d1", **changes: object) -> Lease:
    made = Lease(
        name, domain, f"type-{node}", node, Market.ON_DEMAND, 2.0, LeaseState.READY, NOW,
        ready_at=NOW,
    )  # fmt: skip
    return replace(made, **changes)


@given(st.lists(COUNTS, min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_following_plans_keeps_as_many_as_it_can_and_settles(plans: list[dict]) -> None:
    running: tuple[Replica, ...] = ()
    for step, wanted in enumerate(plans):
        now = NOW + timedelta(minutes=step)
        changes = follow(running, wanted, "s", now, lambda: next(ids))
        after = (*changes.kept, *changes.started)
        before = {replica.id for replica in running}
        for key in {replica.key for replica in running} | wanted.keys():
            had = sum(r.key == key for r in running)
            assert sum(r.key == key for r in after) == wanted.get(key, 0)
            assert sum(r.key == key for r in changes.kept) == min(had, wanted.get(key, 0))
        assert {r.id for r in changes.kept} | {r.id for r in changes.ended} == before
        assert all(r.started_at == now for r in changes.started)
        again = follow(after, wanted, "s", now, lambda: next(ids))
        assert not again.started
        assert not again.ended
        running = after


def test_of_a_surplus_the_youngest_end() -> None:
    old, young = Replica("a", "s", "t", "d", NOW), Replica("b", "s", "t", "d", NOW + timedelta(1))
    changes = follow([young, old], {("t", "d"): 1}, "s", NOW, lambda: "new")
    assert [r.id for r in changes.kept] == ["a"]
    assert [r.id for r in changes.ended] == ["b"]
    assert changes.ended[0].ended_at == NOW


def test_nodes_stay_with_their_replica_and_free_ones_fill_gaps() -> None:
    first, second = (Replica(n, "s", "t", "d1", NOW) for n in ("r1", "r2"))
    combinations = {"t": (("A x1", 2),)}
    leases = [
        lease("l1", replica="r1"), lease("l2", replica="r1"), lease("l3", replica="gone"),
        lease("l4"), lease("l5", domain="d2"), lease("l6", "B x1", replica="r2"),
    ]  # fmt: skip
    changed = {one.id: one.replica for one in assign([first, second], combinations, leases)}
    assert changed == {"l3": "r2", "l4": "r2", "l6": None}
    settled = [replace(one, replica=changed.get(one.id, one.replica)) for one in leases]
    assert assign([first, second], combinations, settled) == []


def test_only_replicas_with_all_their_nodes_stand() -> None:
    replicas = [Replica(n, "s", "t", "d1", NOW) for n in ("r1", "r2")]
    leases = [lease("l1", replica="r1"), lease("l2", replica="r1"), lease("l3", replica="r2")]
    assert standing(replicas, {"t": (("A x1", 2),)}, leases) == {("t", "d1"): 1}
    assert standing(replicas, {}, leases) == {}


def test_nodes_without_a_replica_are_given_back_first() -> None:
    leases = [lease("l1", replica="r1"), lease("l2"), lease("l3", replica="r1")]
    actions = reconcile({leases[0].key: 2}, {}, leases)
    assert [one.id for one in actions.terminate] == ["l2"]


def market(**changes: object) -> AllocationInput:
    """Two templates of one workload on the same node class, one of them a little better."""
    data = AllocationInput.of(
        [workload("chat", 2.0)],
        [
            template("t1", Phase.AGGREGATED, {"A x1": 1}, 1.0),
            template("t2", Phase.AGGREGATED, {"A x1": 2}, 2.0),
        ],
        [offer("d1", "A x1", 3.0, 4)],
        settings=EXACT,
    )
    return replace(data, **changes)


def test_a_running_replica_is_not_shuffled_for_nothing() -> None:
    data = market()
    for chosen in data.templates:
        running = (RunningReplicas(chosen, "d1", 2 if chosen.id == "t1" else 1),)
        held = {("d1", "type-A x1", Market.ON_DEMAND): 2}
        plan = plan_allocation(replace(data, running=running, held=held))
        assert [r.template.id for r in plan.replicas] == [chosen.id]
        assert plan.objective_usd == pytest.approx(6.0)


def test_a_replica_that_ends_costs_its_nodes_restart() -> None:
    """A template of the same nodes that serves more takes its place, and A0 says at what price."""
    data = market(workloads=(workload("chat", 2.2),), offers=(offer("d1", "A x1", 3.0, 2),))
    better = replace(data.templates[1], throughput_rps=2.2)
    data = replace(data, templates=(data.templates[0], better))
    running = (RunningReplicas(data.templates[0], "d1", 2),)
    held = {("d1", "type-A x1", Market.ON_DEMAND): 2}
    plan = plan_allocation(replace(data, running=running, held=held))
    assert [r.template.id for r in plan.replicas] == ["t2"]
    restart = data.settings.restart_minutes / 60.0 * 2 * 3.0
    assert plan.objective_usd == pytest.approx(6.0 + restart)


def test_nodes_that_the_market_no_longer_offers_stay_at_their_price() -> None:
    data = market(offers=(offer("d2", "A x1", 9.0, 4),))
    leases = [lease("l1"), lease("l2"), lease("over", state=LeaseState.TERMINATED)]
    found = from_fleet(data, leases, {("t1", "d1"): 2, ("unknown", "d1"): 1})
    mine = next(o for o in found.offers if o.domain == "d1")
    assert (mine.price_usd_per_hour, mine.stock) == (2.0, 2)
    assert mine.stock_source == "runs; the market no longer offers it"
    assert [(r.template.id, r.count) for r in found.running] == [("t1", 2)]
    plan = replan(found, {("t1", "d1"): 2}, {leases[0].key: 2}, 0.01)
    assert not plan.moves
    assert [(n.offer.domain, n.count, n.new) for n in plan.plan.nodes] == [("d1", 2, 0)]


def test_a_stock_below_what_runs_is_raised_to_it_and_no_further() -> None:
    data = market(offers=(offer("d1", "A x1", 3.0, 1),), workloads=(workload("chat", 9.0),))
    found = from_fleet(data, [lease("l1"), lease("l2")], {})
    assert [o.stock for o in found.offers] == [2]
    assert [n.count for n in plan_allocation(found).nodes] == [2]


@pytest.mark.parametrize("solver", ["columns", "full"])
@pytest.mark.parametrize("gone", [Market.SPOT, Market.ON_DEMAND])
def test_of_an_offer_that_vanished_only_what_runs_is_there(gone: Market, solver: str) -> None:
    """Its sibling of the other market keeps its stock, and the plan passes its check."""
    there = Market.ON_DEMAND if gone is Market.SPOT else Market.SPOT
    data = market(offers=(offer("d1", "A x1", 3.0, 10, there),), workloads=(workload("chat", 6.0),))
    data = replace(data, settings=replace(EXACT, solver=solver))
    found = from_fleet(data, [lease("l1", market=gone)], {})
    plan = plan_allocation(found)
    counts = {n.offer.market: n.count for n in plan.nodes}
    assert counts[gone] <= 1
    assert sum(counts.values()) == 6
    assert plan.served_share == pytest.approx(1.0)


def test_spot_and_on_demand_nodes_count_together_on_one_stock() -> None:
    offers = (offer("d1", "A x1", 3.0, 1), offer("d1", "A x1", 1.0, 1, Market.SPOT))
    leases = [lease("l1"), lease("l2", market=Market.SPOT)]
    assert [o.stock for o in from_fleet(market(offers=offers), leases, {}).offers] == [2, 2]


def test_a_small_saving_moves_nothing_and_a_large_one_does() -> None:
    held = [lease(f"l{n}") for n in range(2)]
    for price, moves in ((2.9, False), (1.0, True)):
        offers = (offer("d1", "A x1", 3.0, 4), offer("d2", "A x1", price, 4))
        data = from_fleet(market(offers=offers), held, {("t1", "d1"): 2})
        found = replan(data, {("t1", "d1"): 2}, {held[0].key: 2}, 0.01)
        assert found.moves == moves
        assert found.plan.nodes[0].offer.domain == ("d2" if moves else "d1")

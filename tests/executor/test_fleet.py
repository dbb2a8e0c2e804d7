"""Leases, reconciliation and the simulated fleet."""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.chaos import MemoryStore
from executor.apply import Caps, apply_actions, end_all, settle
from executor.fleet import Launched, NoCapacityError, TransientError
from executor.lease_store import LeaseStoreError, SqliteLeaseStore
from executor.simulated import SimulatedFleet
from planner.leases import (
    NEXT,
    Lease,
    LeaseState,
    LeaseTransitionError,
    held_nodes,
    reconcile,
)
from planner.types import Market
from tests.builders import offer

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
OFFERS = {
    ("d1", f"type-{node}", Market.ON_DEMAND): offer("d1", node, 1.0, 9) for node in ("A x1", "B x1")
}
KEYS = sorted(OFFERS)


def lease(number: int, state: LeaseState, key=KEYS[0], minutes: int = 0) -> Lease:
    domain, kind, market = key
    return Lease(
        id=f"lease-{number}",
        domain=domain,
        instance_type=kind,
        node_class="A x1",
        market=market,
        price_usd_per_hour=1.0,
        state=state,
        created_at=NOW + timedelta(minutes=minutes),
    )


@given(
    st.lists(st.tuples(st.sampled_from(list(LeaseState)), st.sampled_from(KEYS)), max_size=8),
    st.dictionaries(st.sampled_from(KEYS), st.integers(0, 4)),
)
def test_from_any_state_one_round_reaches_the_plan_and_the_next_does_nothing(states, wanted):
    store = MemoryStore([lease(i, state, key, i) for i, (state, key) in enumerate(states)])
    fleet = SimulatedFleet()
    apply_actions(store, fleet, reconcile(wanted, OFFERS, settle(store, fleet, NOW)), NOW)
    assert held_nodes(store.all()) == Counter({k: n for k, n in wanted.items() if n})
    assert reconcile(wanted, OFFERS, settle(store, fleet, NOW)).nothing
    assert not any(one.state is LeaseState.TERMINATING for one in store.all())


def test_of_surplus_nodes_the_ones_that_serve_nothing_go_first_then_the_youngest() -> None:
    leases = [
        lease(1, LeaseState.READY, minutes=1),
        lease(2, LeaseState.READY, minutes=3),
        lease(3, LeaseState.LAUNCHING, minutes=2),
    ]
    order = [
        [one.id for one in reconcile({KEYS[0]: n}, OFFERS, leases).terminate] for n in (2, 1, 0)
    ]
    assert order == [
        ["lease-3"],
        ["lease-3", "lease-2"],
        ["lease-3", "lease-2", "lease-1"],
    ]


def test_nodes_become_ready_after_their_own_delay_the_same_every_time() -> None:
    fleet = SimulatedFleet(startup_minutes=10.0)
    delays = []
    for number in range(200):
        launched = fleet.launch(lease(number, LeaseState.PLANNED), NOW)
        assert fleet.launch(lease(number, LeaseState.PLANNED), NOW) == launched
        assert launched.ready_at is not None
        delays.append((launched.ready_at - NOW).total_seconds() / 60)
    assert 6.0 <= min(delays) < 7.0
    assert 13.0 < max(delays) <= 14.0
    store = MemoryStore()
    apply_actions(store, fleet, reconcile({KEYS[0]: 1}, OFFERS, []), NOW)
    assert [one.state for one in settle(store, fleet, NOW)] == [LeaseState.LAUNCHING]
    later = NOW + timedelta(minutes=15)
    soon = NOW + timedelta(minutes=5)
    assert [one.state for one in settle(store, fleet, soon)] == [LeaseState.RUNNING]
    assert [one.state for one in settle(store, fleet, later)] == [LeaseState.READY]


def test_failures_come_at_their_rate_and_leave_a_failed_lease() -> None:
    store, fleet = MemoryStore(), SimulatedFleet(failure_rate=0.25, seed=3)
    applied = apply_actions(store, fleet, reconcile({KEYS[0]: 400}, OFFERS, []), NOW)
    assert 60 <= applied.failed <= 140
    assert applied.launched == 400 - applied.failed
    failed = [one for one in store.all() if one.state is LeaseState.FAILED]
    assert len(failed) == applied.failed
    assert "no capacity for type-A x1 in d1" in failed[0].reason
    with pytest.raises(NoCapacityError):
        SimulatedFleet(failure_rate=1.0).launch(lease(0, LeaseState.PLANNED), NOW)


def test_what_an_interrupted_run_began_is_finished_by_the_next() -> None:
    store = MemoryStore([lease(1, LeaseState.PLANNED), lease(2, LeaseState.TERMINATING)])
    fleet = SimulatedFleet()
    states = {one.id: one.state for one in settle(store, fleet, NOW)}
    assert states == {"lease-1": LeaseState.PLANNED, "lease-2": LeaseState.TERMINATED}
    apply_actions(store, fleet, reconcile({KEYS[0]: 1}, OFFERS, store.all()), NOW)
    assert held_nodes(store.all()) == {KEYS[0]: 1}
    assert store.leases["lease-1"].state is LeaseState.LAUNCHING


class Silent(SimulatedFleet):
    """Does not answer."""

    def launch(self, lease: Lease, now: datetime) -> Launched:
        raise TransientError("no answer")


def test_leases_asked_again_count_as_what_they_come_to() -> None:
    planned = [lease(1, LeaseState.PLANNED), lease(2, LeaseState.PLANNED)]
    actions = reconcile({KEYS[0]: 3}, OFFERS, planned)
    found = apply_actions(MemoryStore(planned), Silent(), actions, NOW)
    assert (found.launched, found.failed) == (0, 3)
    found = apply_actions(MemoryStore(planned), SimulatedFleet(), actions, NOW)
    assert (found.launched, found.failed) == (3, 0)


class Watched(SimulatedFleet):
    """Says how many live whenever one is made."""

    def launch(self, lease: Lease, now: datetime) -> Launched:
        found = super().launch(lease, now)
        alive = [one.lease_id for one in self.instances(now) if one.state.lives]
        states = {one.id: one.state for one in STORE.all()}
        assert sum(states[name] is not LeaseState.TERMINATING for name in alive) <= 1
        return found


STORE = MemoryStore()


def test_a_lease_whose_answer_was_lost_leaves_before_another_is_asked_for() -> None:
    fleet, both = Watched(), [lease(1, LeaseState.PLANNED), lease(2, LeaseState.PLANNED)]
    STORE.save_all(both, NOW)
    SimulatedFleet.launch(fleet, both[0], NOW)  # it was made, and nobody knows
    actions = reconcile({KEYS[0]: 1}, OFFERS, both)
    assert [one.id for one in actions.terminate] == ["lease-1"]
    found = apply_actions(STORE, fleet, actions, NOW)
    assert (found.launched, found.terminated) == (1, 1)
    assert [one.lease_id for one in fleet.instances(NOW) if one.state.lives] == ["lease-2"]


def test_settling_tells_what_it_ends() -> None:
    fleet, told = SimulatedFleet(), list[str]()
    orphan = fleet.launch(lease(1, LeaseState.PLANNED), NOW)
    settle(MemoryStore(), fleet, NOW + timedelta(minutes=5), told=told.append)
    assert told == [orphan.instance_id]


@pytest.mark.parametrize("state", list(LeaseState))
def test_only_the_states_that_may_follow_do(state: LeaseState) -> None:
    for other in LeaseState:
        if other in NEXT[state]:
            assert lease(1, state).to(other).state is other
        else:
            with pytest.raises(LeaseTransitionError, match=f"is {state}, it cannot be {other}"):
                lease(1, state).to(other)
    assert state.is_over == (not NEXT[state])


def test_a_token_is_of_lease_zone_market_and_attempt() -> None:
    one = lease(1, LeaseState.PLANNED)
    others = [
        lease(2, LeaseState.PLANNED), replace(one, zone="z"), replace(one, attempt=1),
        replace(one, market=Market.SPOT),
    ]  # fmt: skip
    assert len({one.token, *(other.token for other in others)}) == 5
    assert one.to(LeaseState.LAUNCHING, instance_id="i").token == one.token
    assert len(one.token) <= 64


def test_a_preempted_spot_node_is_seen_gone() -> None:
    fleet = SimulatedFleet(preemptions_per_hour=1.0)
    spot = {("d1", "type-A x1", Market.SPOT): offer("d1", "A x1", 0.3, 9, market=Market.SPOT)}
    store = MemoryStore()
    wanted = dict.fromkeys(spot, 40)
    apply_actions(store, fleet, reconcile(wanted, spot, []), NOW)
    settle(store, fleet, NOW + timedelta(hours=1))
    gone = [one for one in store.all() if one.state is LeaseState.TERMINATED]
    assert 15 <= len(gone) <= 35  # 63% in the mean
    assert {one.reason for one in gone} == {"its node is gone"}
    assert len(reconcile(wanted, spot, store.all()).launch) == len(gone)


def test_caps_hold_launches_back_and_let_leave_what_makes_room() -> None:
    store, fleet = MemoryStore(), SimulatedFleet()
    for caps, launched, why in (
        (Caps(usd_per_hour=2.5), 2, "$3.00/h is over the cap of $2.50/h"),
        (Caps(nodes_per_domain=3), 3, "3 nodes are in d1, its cap"),
        (Caps(launches_per_minute=1), 1, "1 launches in a minute, the cap"),
    ):
        store, fleet = MemoryStore(), SimulatedFleet()
        actions = reconcile({KEYS[0]: 4}, OFFERS, [])
        found = apply_actions(store, fleet, actions, NOW, caps=caps)
        assert (found.launched, found.held_back, found.failed) == (launched, 4 - launched, 0)
        assert found.why == (why,)
        assert len(store.all()) == launched  # nothing is written of what is held back
    caps = Caps(usd_per_hour=2.0)
    store = MemoryStore()
    apply_actions(store, fleet, reconcile({KEYS[0]: 2}, OFFERS, []), NOW, caps=caps)
    wanted, later = {KEYS[1]: 2}, NOW + timedelta(minutes=10)
    first = apply_actions(
        store, fleet, reconcile(wanted, OFFERS, settle(store, fleet, later)), later, caps=caps
    )
    assert (first.launched, first.held_back, first.terminated) == (0, 2, 2)
    apply_actions(
        store, fleet, reconcile(wanted, OFFERS, settle(store, fleet, later)), later, caps=caps
    )
    assert held_nodes(store.all()) == wanted


def test_another_plan_follows_where_offers_have_no_capacity() -> None:
    class Scarce(SimulatedFleet):
        def launch(self, lease: Lease, now: datetime) -> Launched:
            if lease.key == KEYS[0] and len(self.instances(now)) >= 2:
                raise NoCapacityError("no A left")
            return super().launch(lease, now)

    old = replace(lease(1, LeaseState.LAUNCHING, KEYS[1]), instance_id="sim-old", ready_at=NOW)
    for plans, held, terminated in ((0, {KEYS[0]: 2, KEYS[1]: 1}, 0), (1, {KEYS[0]: 1}, 2)):
        store, fleet, asked = MemoryStore([old]), Scarce(), []

        def instead(lacking, store=store, asked=asked, plans=plans):
            asked.append(lacking)
            wanted = {KEYS[0]: 1}  # a part of what came is given back
            return reconcile(wanted, OFFERS, store.all()) if len(asked) <= plans else None

        actions = reconcile({KEYS[0]: 4}, OFFERS, store.all())
        found = apply_actions(store, fleet, actions, NOW, instead=instead)
        assert asked == [{KEYS[0]}]
        assert (found.launched, found.failed, found.terminated) == (2, 2, terminated)
        assert held_nodes(store.all()) == held


def test_what_is_not_answered_holds_the_end_back_also_under_another_plan() -> None:
    class Deaf(SimulatedFleet):
        def launch(self, lease: Lease, now: datetime) -> Launched:
            if lease.key == KEYS[0]:
                raise NoCapacityError("no A left")
            raise TransientError("no answer")

    old = replace(lease(1, LeaseState.LAUNCHING), instance_id="sim-old", ready_at=NOW)
    store, both = MemoryStore([old]), {KEYS[0]: 2, KEYS[1]: 1}
    failed: list[int] = []
    found = apply_actions(
        store, Deaf(), reconcile(both, OFFERS, store.all()), NOW, between=failed.append,
        instead=lambda _: reconcile({KEYS[1]: 1}, OFFERS, store.all()),
    )  # fmt: skip
    assert (found.failed, found.terminated, failed) == (2, 0, [1])
    assert [one.state for one in store.all() if one.id == old.id] == [LeaseState.LAUNCHING]


def test_nodes_of_what_loses_most_are_the_last_to_be_used_for_others() -> None:
    ready = [replace(lease(n, LeaseState.READY, minutes=n), replica=None) for n in range(3)]
    ranks = {"lease-0": 1, "lease-2": 2}
    assert reconcile({KEYS[0]: 2}, OFFERS, ready, ranks).terminate == (ready[2],)
    assert set(reconcile({KEYS[0]: 1}, OFFERS, ready, ranks).terminate) == {ready[0], ready[2]}
    assert reconcile({KEYS[0]: 2}, OFFERS, ready).terminate == (ready[2],)


def test_a_cap_says_which_offers_fit_beside_nodes() -> None:
    two = [lease(n, LeaseState.READY) for n in range(2)]
    offers = list(OFFERS.values())
    assert Caps(usd_per_hour=3.5, launches_per_minute=0).fit(offers, two, NOW) == offers[:1]
    assert Caps(nodes_per_domain=2).fit(offers, two, NOW) == []
    assert Caps().fit(offers, two, NOW) == offers


def test_a_lease_file_of_an_earlier_coral_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "leases.sqlite"
    with sqlite3.connect(path) as old:
        old.executescript(
            """
            CREATE TABLE lease (
                id TEXT PRIMARY KEY, domain TEXT NOT NULL, instance_type TEXT NOT NULL,
                node_class TEXT NOT NULL, market TEXT NOT NULL,
                price_usd_per_hour REAL NOT NULL, state TEXT NOT NULL,
                created_at TEXT NOT NULL, zone TEXT, instance_id TEXT, ready_at TEXT,
                ended_at TEXT, reason TEXT NOT NULL, scenario TEXT NOT NULL);
            INSERT INTO lease VALUES ('a', 'd', 't', 'n', 'spot', 1.0, 'ready',
                '2026-11-29T12:00:00+00:00', NULL, 'local-1-2-a', NULL, NULL, '', 's');
            """
        )
    (found,) = SqliteLeaseStore(path).all()
    assert (found.fleet, found.attempt, found.replica) == ("local", 0, None)


def test_the_store_keeps_leases_and_every_change_as_an_event(tmp_path: Path) -> None:
    store = SqliteLeaseStore(tmp_path / "leases.sqlite")
    fleet = SimulatedFleet()
    apply_actions(store, fleet, reconcile({KEYS[0]: 2, KEYS[1]: 1}, OFFERS, []), NOW)
    again = SqliteLeaseStore(tmp_path / "leases.sqlite")
    assert again.all() == store.all()
    assert held_nodes(again.all()) == {KEYS[0]: 2, KEYS[1]: 1}
    assert end_all(again, fleet, again.all(), NOW) == 3
    assert end_all(again, fleet, again.all(), NOW) == 0
    states = [state for _, state, _ in store.events(store.all()[0].id)]
    assert states == ["planned", "launching", "terminating", "terminated"]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(LeaseState), st.booleans())))
def test_a_store_that_read_before_sees_what_one_that_is_new_sees(
    writes: list[tuple[int, LeaseState, bool]],
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "leases.sqlite"
        reader, writer = SqliteLeaseStore(path), SqliteLeaseStore(path)
        for number, state, looks in writes:
            writer.save(lease(number, state, minutes=-number), NOW)
            if looks:
                assert reader.all() == SqliteLeaseStore(path).all()
        assert reader.all() == SqliteLeaseStore(path).all()
        assert reader.some({"lease-1", "lease-3"}) == [
            x for x in reader.all() if x.id in {"lease-1", "lease-3"}
        ]


def test_a_damaged_lease_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "leases.sqlite"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(LeaseStoreError, match=r"leases.sqlite is damaged .* move it away"):
        SqliteLeaseStore(path).all()
    locked = tmp_path / "locked.sqlite"
    SqliteLeaseStore(locked).all()
    with sqlite3.connect(locked) as other:
        other.execute("BEGIN IMMEDIATE")
        assert SqliteLeaseStore(locked).all() == []  # readers of WAL are never locked out

"""Who serves on until others do, and what comes together or not at all."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from planner.allocation.problem import AllocationInput
from planner.leases import Lease, LeaseState
from planner.replicas import Replica, scattered
from planner.succession import coming, going_order, serving, shortfall_rps, staying
from planner.types import Market, Phase
from tests.builders import offer, template, workload

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
COMBINATIONS = {"pair": (("A x1", 1), ("B x1", 1)), "one": (("A x1", 1),)}
MODELS = {"pair": "m", "one": "m"}


def lease(name: str, node: str, replica: str | None, state: LeaseState = LeaseState.READY) -> Lease:
    return Lease(
        name, "d1", f"type-{node}", node, Market.SPOT, 1.0, state, NOW, ready_at=NOW,
        replica=replica,
    )  # fmt: skip


def replica(name: str, template: str = "pair", minutes: float = 0.0) -> Replica:
    return Replica(name, "s", template, "d1", NOW - timedelta(minutes=minutes))


WHOLE = [lease("a", "A x1", "r"), lease("b", "B x1", "r")]


@pytest.mark.parametrize(
    ("leases", "routed", "comes"),
    [
        (WHOLE, None, False),
        (WHOLE, {"r"}, False),
        (WHOLE, set(), True),  # nodes are there, and it does not answer yet
        (WHOLE[:1], None, True),
        ([*WHOLE[:1], lease("b", "B x1", "r", LeaseState.RUNNING)], None, True),
        ([*WHOLE[:1], lease("b", "B x1", None)], None, False),  # about to get a node that is free
        ([*WHOLE[:1], lease("b", "B x1", "gone")], None, False),
    ],
)
def test_a_replica_comes_until_its_nodes_are_ready_and_it_answers(
    leases: list[Lease], routed: set[str] | None, comes: bool
) -> None:
    late = NOW - timedelta(minutes=20)
    found = coming([replica("r")], COMBINATIONS, leases, routed, late)
    assert [one.id for one in found] == ["r"] * comes


def test_a_replica_that_is_whole_and_never_answers_is_not_waited_for() -> None:
    old, later = replica("r", minutes=30), NOW + timedelta(minutes=1)
    assert coming([old], COMBINATIONS, WHOLE, set(), NOW) == [old]  # its nodes came just now
    assert coming([old], COMBINATIONS, WHOLE, set(), later) == []
    assert coming([old], COMBINATIONS, WHOLE[:1], set(), later) == [old]  # `scattered` ends that


@pytest.mark.parametrize(
    ("models", "leases", "leaving", "stays"),
    [
        ({"m"}, WHOLE, {"a", "b"}, True),
        ({"other"}, WHOLE, {"a", "b"}, False),  # nothing comes for its model
        (set(), WHOLE, {"a", "b"}, False),
        ({"m"}, WHOLE, {"a"}, False),  # the plan uses its other node
        ({"m"}, [WHOLE[0], lease("b", "B x1", "r", LeaseState.RUNNING)], {"a", "b"}, False),
        ({"m"}, [], {"a", "b"}, False),
    ],
)
def test_a_replica_stays_on_nodes_that_the_plan_gives_up(
    models: set[str], leases: list[Lease], leaving: set[str], stays: bool
) -> None:
    ended = [replace(replica("r"), ended_at=NOW)]
    assert staying(ended, models, MODELS, leases, leaving) == [replica("r")] * stays


def test_what_did_not_come_together_in_time_is_named_with_what_lacks() -> None:
    half = [WHOLE[0], lease("b", "B x1", "r", LeaseState.LAUNCHING)]
    late = NOW - timedelta(minutes=20)
    old, young = replica("r", minutes=21), replica("r", minutes=19)
    assert scattered([old], COMBINATIONS, half, late) == {old: {"B x1"}}
    assert scattered([young], COMBINATIONS, half, late) == {}
    assert scattered([old], COMBINATIONS, WHOLE, late) == {}
    lost = replace(WHOLE[1], state=LeaseState.TERMINATED, ended_at=NOW)
    assert scattered([old], COMBINATIONS, [WHOLE[0], lost], late) == {}  # its time begins anew
    assert scattered([old], COMBINATIONS, [WHOLE[0], lost], NOW + timedelta(minutes=1))


def served_by(*sizes: float, demand: float = 10.0) -> AllocationInput:
    """Templates t0, t1, ... of so many requests/s each, for one workload in d1."""
    made = [template(f"t{n}", Phase.AGGREGATED, {"A x1": 1}, rps) for n, rps in enumerate(sizes)]
    return AllocationInput.of([workload(demand_rps=demand)], made, [offer("d1", "A x1", 1.0, 9)])


def test_what_loses_least_goes_first() -> None:
    data = served_by(8.0, 3.0, 5.0, demand=12.0)
    large, small, middle = (replica(f"r{n}", f"t{n}", minutes=9 - n) for n in range(3))
    every = [large, small, middle]
    # Without the small one 12 are served, without the middle one 11, without the large one 8.
    assert going_order(data, every, every) == [small, middle, large]
    idle = replica("r3", "t0")
    assert going_order(data, every, [*every, idle])[0] == idle  # it does not serve yet
    twin = replica("r4", "t1", minutes=1)
    assert going_order(data, [small, twin], [small, twin]) == [twin, small]  # the youngest


def test_a_transient_shortfall_is_what_was_served_and_will_be() -> None:
    data = served_by(8.0, 3.0)
    old, new = replica("old", "t0"), replica("new", "t1")
    assert shortfall_rps(data, [old], [old], [new]) == {}
    assert shortfall_rps(data, [old], [], [new]) == {"chat": pytest.approx(3.0)}  # as planned
    assert shortfall_rps(data, [old, new], [new], [new, old]) == {"chat": pytest.approx(7.0)}
    assert shortfall_rps(data, [new], [], []) == {}  # nothing of it is wanted any more
    gone = replica("gone", "no longer in the library")
    assert shortfall_rps(data, [gone], [], [new]) == {}


def test_a_pair_serves_what_its_weaker_half_does() -> None:
    pair = [
        template("p", Phase.PREFILL, {"A x1": 1}, 4.0),
        template("d", Phase.DECODE, {"A x1": 1}, 3.0),
    ]
    data = AllocationInput.of([workload(demand_rps=10.0)], pair, [offer("d1", "A x1", 1.0, 9)])
    both = [replica("1", "p"), replica("2", "d")]
    assert shortfall_rps(data, both, both[1:], both) == {"chat": pytest.approx(3.0)}


def test_who_serves_has_all_nodes_ready_and_answers() -> None:
    whole = replica("r")
    assert serving([whole], COMBINATIONS, WHOLE, None) == [whole]
    assert serving([whole], COMBINATIONS, WHOLE, {"r"}) == [whole]
    assert serving([whole], COMBINATIONS, WHOLE, ()) == []
    assert serving([whole], COMBINATIONS, WHOLE[:1], None) == []

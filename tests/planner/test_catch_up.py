"""Leases and instances brought into agreement: by table, and from any state."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catch_up import Ask, End, Instance, InstanceState, Patience, Record, Step, catch_up
from planner.leases import Lease, LeaseState
from planner.types import Market

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
PATIENCE = Patience()
HOUR = timedelta(hours=1)


def lease(state: LeaseState, asked: timedelta = HOUR, **changes: object) -> Lease:
    made = Lease(
        "a", "d1", "type-a", "A x1", Market.SPOT, 1.0, state, NOW - HOUR, instance_id="i-1",
        requested_at=NOW - asked,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def instance(state: InstanceState, name: str = "i-1", of: str = "a", age: float = 3600) -> Instance:
    return Instance(name, of, state, NOW - timedelta(seconds=age))


def steps(one: Lease, *instances: Instance) -> list[Step]:
    return catch_up([one], instances, NOW, PATIENCE)


PENDING, RUNNING = InstanceState.PENDING, InstanceState.RUNNING
STOPPING, GONE = InstanceState.STOPPING, InstanceState.GONE


@pytest.mark.parametrize(
    ("before", "seen", "after"),
    [
        (LeaseState.LAUNCHING, RUNNING, LeaseState.RUNNING),
        (LeaseState.LAUNCHING, STOPPING, LeaseState.TERMINATING),
        (LeaseState.READY, STOPPING, LeaseState.TERMINATING),
        (LeaseState.READY, GONE, LeaseState.TERMINATED),
        (LeaseState.READY, None, LeaseState.TERMINATED),
        (LeaseState.LAUNCHING, PENDING, LeaseState.TERMINATING),  # for an hour
        (LeaseState.DRAINING, RUNNING, LeaseState.TERMINATING),
        (LeaseState.TERMINATING, GONE, LeaseState.TERMINATED),
        (LeaseState.TERMINATING, None, LeaseState.TERMINATED),
    ],
)
def test_what_the_cloud_says_is_recorded(
    before: LeaseState, seen: InstanceState | None, after: LeaseState
) -> None:
    found = steps(lease(before), *([instance(seen)] if seen else []))
    assert [step.lease.state for step in found if isinstance(step, Record)] == [after]
    assert len(found) == 1


def test_what_was_asked_lately_may_not_be_listed_yet() -> None:
    fresh = timedelta(seconds=20)
    assert steps(lease(LeaseState.LAUNCHING, fresh)) == []
    assert steps(lease(LeaseState.TERMINATING, fresh)) == []
    assert steps(lease(LeaseState.LAUNCHING, fresh), instance(PENDING, age=20)) == []


def test_a_planned_lease_is_asked_for_again_or_finds_its_instance() -> None:
    planned = lease(LeaseState.PLANNED, instance_id=None)
    assert steps(planned) == [Ask(planned)]
    (found,) = steps(planned, instance(RUNNING, "i-7"))
    assert isinstance(found, Record)
    assert (found.lease.state, found.lease.instance_id) == (LeaseState.LAUNCHING, "i-7")


def test_ready_when_its_time_has_come() -> None:
    up = lease(LeaseState.RUNNING, ready_at=NOW)
    (found,) = steps(up, instance(RUNNING))
    assert isinstance(found, Record) and found.lease.state is LeaseState.READY
    assert steps(replace(up, ready_at=NOW + HOUR), instance(RUNNING)) == []


@pytest.mark.parametrize(
    ("before", "changes", "after", "reason"),
    [
        (LeaseState.RUNNING, {"ready_at": NOW}, LeaseState.READY, ""),
        (LeaseState.LAUNCHING, {"ready_at": NOW}, LeaseState.READY, ""),
        (LeaseState.READY, {"ready_at": NOW, "silent_s": 179.0}, None, ""),
        (LeaseState.READY, {"silent_s": 181.0}, LeaseState.TERMINATING, "its agent is silent for"),
        (LeaseState.RUNNING, {"silent_s": 181.0}, LeaseState.TERMINATING, "its agent is silent"),
        (LeaseState.DRAINING, {"silent_s": 181.0}, LeaseState.TERMINATING, ""),
        (LeaseState.RUNNING, {}, LeaseState.TERMINATING, "its agent did not come"),
    ],
)
def test_what_an_instances_agent_tells(
    before: LeaseState, changes: dict[str, object], after: LeaseState | None, reason: str
) -> None:
    asked = timedelta(seconds=PATIENCE.ready_s + 1)
    found = steps(lease(before, asked), replace(instance(RUNNING), **changes))  # type: ignore[arg-type]
    (said,) = [step.lease for step in found if isinstance(step, Record)] or [None]
    assert (said and said.state) == after
    assert said is None or said.reason.startswith(reason)
    if after is LeaseState.READY:
        assert said is not None and said.ready_at == NOW
    soon = steps(lease(LeaseState.RUNNING, timedelta(minutes=30)), instance(RUNNING))
    assert soon == []  # an agent has time to come


def test_whatever_has_no_lease_that_wants_it_is_ended() -> None:
    ready = lease(LeaseState.READY)
    for others, ended in (
        ((instance(RUNNING), instance(PENDING, "i-2")), ["i-2"]),
        ((instance(RUNNING), instance(RUNNING, "i-3", of="b", age=61)), ["i-3"]),
        ((instance(RUNNING), instance(RUNNING, "i-3", of="b", age=59)), []),
        ((instance(RUNNING), instance(GONE, "i-2")), []),
    ):
        found = steps(ready, *others)
        assert [step.instance_id for step in found if isinstance(step, End)] == ended
    for over in (LeaseState.TERMINATED, LeaseState.FAILED):
        (found,) = steps(lease(over), instance(PENDING, age=1))
        assert isinstance(found, End)
    (found,) = steps(lease(LeaseState.TERMINATING), instance(RUNNING))
    assert isinstance(found, End)


states = st.sampled_from(list(LeaseState))
seen = st.lists(
    st.tuples(st.sampled_from(list(InstanceState)), st.sampled_from(["i-1", "i-2"]),
              st.sampled_from(["a", "b"])),
    max_size=4, unique_by=lambda one: one[1],
)  # fmt: skip


@given(states, seen, st.sampled_from([timedelta(0), HOUR]), st.booleans())
def test_from_any_state_passes_come_to_an_end(
    state: LeaseState,
    found: list[tuple[InstanceState, str, str]],
    asked: timedelta,
    known: bool,
) -> None:
    """Against a cloud that does what it is told: few passes, and then the two agree."""
    one = lease(state, asked, instance_id="i-1" if known else None)
    instances = {name: instance(s, name, of) for s, name, of in found}
    now, todo = NOW, list[Step]()
    for _ in range(8):
        todo = catch_up([one], list(instances.values()), now, PATIENCE)
        for step in todo:
            if isinstance(step, Record):
                one = step.lease
            elif isinstance(step, End):
                instances[step.instance_id] = replace(instances[step.instance_id], state=GONE)
            else:
                one = one.to(LeaseState.LAUNCHING, instance_id="i-9", requested_at=now)
                instances["i-9"] = replace(instance(RUNNING, "i-9"), launched_at=now)
        for name, x in instances.items():
            if x.state is STOPPING:
                instances[name] = replace(x, state=GONE)
        now += timedelta(seconds=200)
    assert todo == []
    alive = {name for name, x in instances.items() if x.state.lives and x.lease_id == "a"}
    assert alive == ({one.instance_id} if one.state.is_held else set())
    assert one.state not in {LeaseState.PLANNED, LeaseState.DRAINING, LeaseState.TERMINATING}

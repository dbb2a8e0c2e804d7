"""What brings leases and instances into agreement, whatever was interrupted.

Pure: compares what is written with what the cloud lists. Formulation, section 11.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from planner.leases import Lease, LeaseState

NODE_GONE = "its node is gone"
NODE_GOING = "its node is going"
AGENT_LOST = "its agent is silent"
NOTICED = "its cloud takes it"  # and when, as a spot notice says


class InstanceState(StrEnum):
    """What the cloud says of an instance."""

    PENDING = "pending"
    RUNNING = "running"
    HALTED = "halted"  # stopped by hand: it does not serve, and is still there
    STOPPING = "stopping"  # told to end; it may still bill
    GONE = "gone"

    @property
    def lives(self) -> bool:
        return self in {InstanceState.PENDING, InstanceState.RUNNING, InstanceState.HALTED}


@dataclass(frozen=True, slots=True)
class Instance:
    """One machine as its cloud lists it."""

    id: str
    lease_id: str  # by its tag
    state: InstanceState
    launched_at: datetime  # by the cloud's clock
    addresses: tuple[str, ...] = ()  # its own network's first
    ready_at: datetime | None = None  # since when its agent is there; None: that is not known
    silent_s: float = 0.0  # of its agent, while the controller listened


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds, before something that is not seen counts as not there."""

    visible_s: float = 60.0  # of an instance that was asked for
    launch_s: float = 1800.0  # of one that is pending
    grace_s: float = 60.0  # of one without a lease
    ready_s: float = 3600.0  # of one that runs and whose agent never came
    silent_s: float = 180.0  # of an agent that was there: its node is lost


@dataclass(frozen=True, slots=True)
class Record:
    """Write the lease: the cloud says so."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the cloud for the lease's instance (again)."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class End:
    """End an instance."""

    instance_id: str
    why: str


Step = Record | Ask | End


def catch_up(
    leases: Sequence[Lease], instances: Sequence[Instance], now: datetime, patience: Patience
) -> list[Step]:
    """Steps of one pass; each may be done again. None: the two agree.

    The instances must have been listed before the leases were read.
    """
    of_lease: dict[str, list[Instance]] = defaultdict(list)
    for instance in sorted(instances, key=lambda one: (one.launched_at, one.id)):
        of_lease[instance.lease_id].append(instance)
    steps: list[Step] = []
    for lease in leases:
        steps += _of(lease, of_lease.pop(lease.id, []), now, patience)
    for orphans in of_lease.values():
        steps += [
            End(one.id, "no lease names it")
            for one in orphans
            if one.state.lives and now - one.launched_at >= _seconds(patience.grace_s)
        ]
    return steps


def was_taken(lease: Lease) -> bool:
    """Whether a node ended though its plan wanted it: preempted, lost, or ended by hand."""
    return lease.state is LeaseState.TERMINATED and lease.reason.startswith(
        (NODE_GONE, NODE_GOING, NOTICED)
    )


def _of(lease: Lease, mine: list[Instance], now: datetime, patience: Patience) -> list[Step]:
    alive = [one for one in mine if one.state.lives]
    if lease.state is LeaseState.PLANNED:
        if alive:
            return [Record(lease.to(LeaseState.LAUNCHING, instance_id=alive[0].id))]
        return [Ask(lease)]
    if lease.state.has_instance:
        own = next((one for one in mine if one.id == lease.instance_id), None)
        return [*_own(lease, own, now, patience), *_others(lease, alive)]
    if lease.state is LeaseState.TERMINATING:
        return _ending(lease, mine, now, patience)
    return [End(one.id, f"its lease is {lease.state}") for one in alive]


def _own(lease: Lease, own: Instance | None, now: datetime, patience: Patience) -> list[Step]:
    """What the instance of a lease that is held, or drains, tells."""
    if own is None:
        return [] if _fresh(lease, now, patience) else [Record(_over(lease, NODE_GONE, now))]
    if own.state is InstanceState.GONE:
        return [Record(_over(lease, NODE_GONE, now))]
    if own.state in {InstanceState.STOPPING, InstanceState.HALTED}:
        return [Record(lease.to(LeaseState.TERMINATING, NODE_GOING))]
    if lease.state is LeaseState.DRAINING:
        if lease.drain_until is not None and now < lease.drain_until:
            return []
        return [Record(lease.to(LeaseState.TERMINATING, lease.reason))]
    return _coming_up(lease, own, now, patience)


def _coming_up(lease: Lease, own: Instance, now: datetime, patience: Patience) -> list[Step]:
    """A node that is held and lives."""
    waited = now - (lease.requested_at or lease.created_at)
    ready_at = own.ready_at or lease.ready_at
    if own.state is InstanceState.PENDING:
        late = waited > _seconds(patience.launch_s)
        return [Record(lease.to(LeaseState.TERMINATING, "it did not come up"))] if late else []
    if own.silent_s > patience.silent_s and lease.state in {LeaseState.RUNNING, LeaseState.READY}:
        return [Record(lease.to(LeaseState.TERMINATING, f"{AGENT_LOST} for {own.silent_s:.0f} s"))]
    if lease.state is not LeaseState.READY and ready_at and ready_at <= now:
        return [Record(lease.to(LeaseState.READY, ready_at=ready_at))]
    if lease.state is LeaseState.LAUNCHING:
        return [Record(lease.to(LeaseState.RUNNING))]
    if (
        ready_at is None
        and lease.state is LeaseState.RUNNING
        and waited > _seconds(patience.ready_s)
    ):
        return [Record(lease.to(LeaseState.TERMINATING, "its agent did not come"))]
    return []


def _others(lease: Lease, alive: list[Instance]) -> list[Step]:
    return [End(one.id, "its lease has another") for one in alive if one.id != lease.instance_id]


def _ending(lease: Lease, mine: list[Instance], now: datetime, patience: Patience) -> list[Step]:
    alive = [one for one in mine if one.state.lives]
    if alive:
        return [End(one.id, lease.reason) for one in alive]
    if any(one.state is InstanceState.STOPPING for one in mine):
        return []
    seen_gone = any(one.id == lease.instance_id for one in mine)
    if not seen_gone and _fresh(lease, now, patience):
        return []
    return [Record(_over(lease, lease.reason, now))]


def _fresh(lease: Lease, now: datetime, patience: Patience) -> bool:
    """Whether the cloud was asked so lately that it may not list the instance yet."""
    asked = lease.requested_at
    return asked is not None and abs(now - asked) < _seconds(patience.visible_s)


def _over(lease: Lease, reason: str, now: datetime) -> Lease:
    return replace(lease.to(LeaseState.TERMINATED, reason), ended_at=now)


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)

"""Leases: one node from intention to confirmed termination, and how plans become actions.

Types and the pure reconciliation; stores and fleets live in `executor/`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from planner.errors import CoralError
from planner.types import Market, Offer

LeaseKey = tuple[str, str, Market]  # domain, instance type, market


class LeaseState(StrEnum):
    """Where a lease stands."""

    PLANNED = "planned"  # written down; the cloud may have been asked, its answer is not known
    LAUNCHING = "launching"  # the cloud took the request
    RUNNING = "running"  # the instance runs, its node does not serve yet
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, gets nothing new
    TERMINATING = "terminating"
    TERMINATED = "terminated"  # the cloud confirmed it
    FAILED = "failed"  # the cloud made none

    @property
    def is_held(self) -> bool:
        """Whether the node counts as running for the next plan."""
        return self in HELD

    @property
    def has_instance(self) -> bool:
        """Whether the cloud made one and was not told to end it."""
        return self in HELD - {LeaseState.PLANNED} or self is LeaseState.DRAINING

    @property
    def is_over(self) -> bool:
        return self in {LeaseState.TERMINATED, LeaseState.FAILED}


COMING_UP = (LeaseState.PLANNED, LeaseState.LAUNCHING, LeaseState.RUNNING, LeaseState.READY)
HELD = frozenset(COMING_UP)
NEXT: Mapping[LeaseState, frozenset[LeaseState]] = {
    LeaseState.PLANNED: frozenset(
        {LeaseState.LAUNCHING, LeaseState.TERMINATING, LeaseState.FAILED}
    ),
    LeaseState.LAUNCHING: frozenset(
        {LeaseState.RUNNING, LeaseState.READY, LeaseState.TERMINATING, LeaseState.TERMINATED}
    ),
    LeaseState.RUNNING: frozenset(
        {LeaseState.READY, LeaseState.DRAINING, LeaseState.TERMINATING, LeaseState.TERMINATED}
    ),
    LeaseState.READY: frozenset(
        {LeaseState.DRAINING, LeaseState.TERMINATING, LeaseState.TERMINATED}
    ),
    LeaseState.DRAINING: frozenset({LeaseState.TERMINATING, LeaseState.TERMINATED}),
    LeaseState.TERMINATING: frozenset({LeaseState.TERMINATED}),
    LeaseState.TERMINATED: frozenset(),
    LeaseState.FAILED: frozenset(),
}  # formulation, section 11


class LeaseTransitionError(CoralError):
    """A state that cannot follow the one before."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One node."""

    id: str
    domain: str
    instance_type: str
    node_class: str
    market: Market
    price_usd_per_hour: float  # at launch: what it costs until it ends
    state: LeaseState
    created_at: datetime
    zone: str | None = None
    instance_id: str | None = None
    ready_at: datetime | None = None
    ended_at: datetime | None = None
    reason: str = ""
    scenario: str = ""  # whose plan it serves
    replica: str | None = None  # id of the replica that it is a node of
    fleet: str = "simulated"  # the kind that has it
    attempt: int = 0  # of its requests; each has a token of its own
    requested_at: datetime | None = None  # the last time that the cloud was asked
    drain_until: datetime | None = None  # a node that drains is ended then; None: now

    @property
    def key(self) -> LeaseKey:
        return (self.domain, self.instance_type, self.market)

    @property
    def token(self) -> str:
        """Of its request: asking again gives the same instance (at most 64 characters)."""
        text = f"{self.id}|{self.zone}|{self.market}|{self.attempt}"
        return f"coral-{hashlib.sha256(text.encode()).hexdigest()[:40]}"

    def to(self, state: LeaseState, reason: str = "", **changes: object) -> Lease:
        """The same lease in another state.

        Raises LeaseTransitionError: it cannot follow.
        """
        if state not in NEXT[self.state]:
            raise LeaseTransitionError(f"lease {self.id} is {self.state}, it cannot be {state}")
        return replace(self, state=state, reason=reason, **changes)  # type: ignore[arg-type]


class LeaseStore(Protocol):
    """Where leases live; every lease saved is one durable event."""

    def all(self) -> list[Lease]: ...
    def save(self, lease: Lease, at: datetime) -> None: ...
    def save_all(self, leases: Sequence[Lease], at: datetime) -> None:
        """All or none of them."""
        ...


@dataclass(frozen=True, slots=True)
class Actions:
    """What brings the fleet to a plan."""

    launch: tuple[Offer, ...]  # one entry per node
    terminate: tuple[Lease, ...]

    @property
    def nothing(self) -> bool:
        return not self.launch and not self.terminate

    def and_end(self, leases: Sequence[Lease]) -> Actions:
        """The same, and these leave too."""
        return replace(self, terminate=(*self.terminate, *leases))


def held_nodes(leases: Sequence[Lease]) -> Counter[LeaseKey]:
    """Nodes that run, or are about to, by offer."""
    return Counter(lease.key for lease in leases if lease.state.is_held)


def reconcile(
    wanted: Mapping[LeaseKey, int],
    offers: Mapping[LeaseKey, Offer],
    leases: Sequence[Lease],
    ranks: Mapping[str, int] | None = None,
) -> Actions:
    """The difference between a plan and the leases.

    Of surplus nodes those go first that no replica has, then those that are farthest from serving,
    then the youngest. `ranks`, by lease id, are of nodes whose replica ends and serves still: the
    higher, the later the plan takes them for another replica; so they are the first surplus.
    Applying the actions and asking again gives no action.
    """
    late = ranks or {}
    held = held_nodes(leases)
    launch: list[Offer] = []
    for key in sorted(wanted):
        if wanted[key] > held[key]:
            launch += [offers[key]] * (wanted[key] - held[key])
    surplus: list[Lease] = []
    for key in sorted(held):
        mine = [lease for lease in leases if lease.key == key and lease.state.is_held]
        mine.sort(key=lambda lease: lease.id)
        mine.sort(key=lambda lease: lease.created_at, reverse=True)
        mine.sort(key=lambda lease: COMING_UP.index(lease.state))
        mine.sort(key=lambda lease: lease.replica is not None)
        mine.sort(key=lambda lease: late.get(lease.id, 0), reverse=True)
        surplus += mine[: max(0, held[key] - wanted.get(key, 0))]
    return Actions(tuple(launch), tuple(surplus))

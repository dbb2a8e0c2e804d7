"""Bring a fleet to a plan: every step is written before it is taken and after it was confirmed."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from executor.fleet import Fleet, NoCapacityError
from planner.leases import Actions, Lease, LeaseState, LeaseStore
from planner.types import Offer

NOT_IN_PLAN = "not in the plan"
NODE_GONE = "its node is gone"
ALL_DOWN = "coral down"


@dataclass(frozen=True, slots=True)
class Applied:
    """What was done."""

    launched: int
    failed: int
    terminated: int

    @property
    def nothing(self) -> bool:
        return not (self.launched or self.failed or self.terminated)


def apply_actions(
    store: LeaseStore,
    fleet: Fleet,
    actions: Actions,
    now: datetime,
    scenario: str = "",
    between: Callable[[int], None] = lambda _: None,
) -> Applied:
    """Launch, then terminate. Killed anywhere, the next run finishes what was begun.

    `between` is called when nodes are launched and those that leave are marked, but still run: with
    the number of launches that failed. While a launch fails nothing is terminated: what leaves may
    be all that serves.
    """
    failed = sum(not _launch(store, fleet, offer, now, scenario) for offer in actions.launch)
    leaving = () if failed else actions.terminate
    for lease in leaving:
        store.save(lease.to(LeaseState.TERMINATING, NOT_IN_PLAN), now)
    between(failed)
    for lease in leaving:
        end_lease(store, fleet, lease, now, NOT_IN_PLAN)
    return Applied(len(actions.launch) - failed, failed, len(leaving))


def settle(
    store: LeaseStore, fleet: Fleet, now: datetime, scenario: str | None = None
) -> list[Lease]:
    """Bring leases up to what the cloud says now, and finish what an interrupted run began.

    Returns the scenario's leases, or all without one.
    """
    for lease in _of(store, scenario):
        if lease.state is LeaseState.PLANNED:
            _request(store, fleet, lease, now)
        elif lease.state.is_held and fleet.is_gone(lease.instance_id or ""):
            store.save(lease.to(LeaseState.TERMINATED, NODE_GONE, ended_at=now), now)
        elif lease.state is LeaseState.LAUNCHING and lease.ready_at and lease.ready_at <= now:
            store.save(lease.to(LeaseState.READY), now)
        elif lease.state is LeaseState.TERMINATING:
            end_lease(store, fleet, lease, now, lease.reason)
    return _of(store, scenario)


def end_lease(store: LeaseStore, fleet: Fleet, lease: Lease, now: datetime, reason: str) -> None:
    """Terminate one node; over only once the cloud confirmed it."""
    if lease.state is not LeaseState.TERMINATING:
        store.save(lease.to(LeaseState.TERMINATING, reason), now)
    if lease.instance_id is not None:
        fleet.terminate(lease.instance_id)
    store.save(lease.to(LeaseState.TERMINATED, reason, ended_at=now), now)


def end_all(store: LeaseStore, fleet: Fleet, leases: Sequence[Lease], now: datetime) -> int:
    """Terminate everything that is not over; how many there were."""
    running = [lease for lease in leases if not lease.state.is_over]
    for lease in running:
        end_lease(store, fleet, lease, now, ALL_DOWN)
    return len(running)


def _launch(store: LeaseStore, fleet: Fleet, offer: Offer, now: datetime, scenario: str) -> bool:
    lease = Lease(
        id=uuid.uuid4().hex,
        domain=offer.domain,
        instance_type=offer.instance_type,
        node_class=offer.node_class,
        market=offer.market,
        price_usd_per_hour=offer.price_usd_per_hour,
        state=LeaseState.PLANNED,
        created_at=now,
        zone=offer.zone,
        scenario=scenario,
    )
    store.save(lease, now)
    return _request(store, fleet, lease, now)


def _request(store: LeaseStore, fleet: Fleet, lease: Lease, now: datetime) -> bool:
    try:
        instance_id, ready_at = fleet.launch(lease, now)
    except NoCapacityError as error:
        store.save(lease.to(LeaseState.FAILED, str(error), ended_at=now), now)
        return False
    launching = lease.to(LeaseState.LAUNCHING, instance_id=instance_id, ready_at=ready_at)
    store.save(launching, now)
    return True


def _of(store: LeaseStore, scenario: str | None) -> list[Lease]:
    return [lease for lease in store.all() if scenario in {None, lease.scenario}]

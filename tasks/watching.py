"""Between two rounds: wait, and wake early where the fleet lost something."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import UTC, datetime

from catalog.store import Catalog
from executor.apply import settle
from executor.control.notices import SPOT
from executor.fleet import Fleet, TransientError
from executor.home import HomeFiles
from executor.lease_store import SqliteLeaseStore
from executor.notices_file import read_notices
from planner.catch_up import Patience, Record, catch_up
from planner.leases import LeaseState
from planner.scenario import ScenarioSpec
from planner.succession import WAITS
from tasks.operating import FleetBusyError, fleet_lock, fleet_of, lease_store

LOOK_EVERY_S = 15.0  # a spot notice leaves two minutes
OVER = "the interval is over"
LOST, NOTICED = "a node is lost", "a node is to be taken"
WAITING = "nodes wait for those that follow them"
WAITING_S = 60.0  # before it is looked whether they still must


def wait_for_cause(
    catalog: Catalog,
    spec: ScenarioSpec,
    seconds: float,
    look_every_s: float = LOOK_EVERY_S,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait for the next round; why it is to begin."""
    store, fleet = lease_store(catalog), fleet_of(catalog.home, spec, draft=True)
    began = time.monotonic()
    ends = began + seconds
    while (left := ends - time.monotonic()) > 0:
        sleep(min(look_every_s, left))
        now = datetime.now(UTC)
        end_drained(catalog, store, fleet, now)
        cause = cause_of(catalog, store, fleet, now, spec.name)
        if cause:
            return cause
        if time.monotonic() - began >= WAITING_S and _waits(store, spec.name):
            return WAITING
    return OVER


def _waits(store: SqliteLeaseStore, scenario: str) -> bool:
    return any(x.state.is_held and x.reason == WAITS for x in store.all() if x.scenario == scenario)


def end_drained(catalog: Catalog, store: SqliteLeaseStore, fleet: Fleet, now: datetime) -> None:
    """Nodes whose drain is over are ended, not only in the next round: they bill."""
    drained = [
        lease
        for lease in store.all()
        if lease.fleet == fleet.kind
        and lease.state is LeaseState.DRAINING
        and (lease.drain_until or now) <= now
    ]
    if drained:
        with contextlib.suppress(FleetBusyError, TransientError), fleet_lock(catalog):
            settle(store, fleet, now)


def cause_of(
    catalog: Catalog, store: SqliteLeaseStore, fleet: Fleet, now: datetime, scenario: str
) -> str:
    """What asks for a round of the scenario at once; '' where nothing does.

    What another scenario's round must heed begins none here: it would begin one again and again.
    """
    try:
        instances = fleet.instances(now)
    except TransientError:
        return ""
    leases = [lease for lease in store.all() if lease.fleet == fleet.kind]
    for step in catch_up(leases, instances, now, Patience()):
        if isinstance(step, Record) and step.lease.state in {
            LeaseState.TERMINATED,
            LeaseState.TERMINATING,
        }:
            before = next(lease for lease in leases if lease.id == step.lease.id)
            if before.state.is_held:
                return LOST
    noticed = read_notices(HomeFiles(catalog.home).notices).nodes
    held = {x.id: x for x in leases if x.state.is_held and x.scenario == scenario}
    for lease in (held[name] for name in noticed.keys() & held.keys()):
        heeded = lease.reason == WAITS or lease.replica is None
        if noticed[lease.id].kind == SPOT or not heeded:
            return NOTICED
    return ""

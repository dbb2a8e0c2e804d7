"""The fleet as the command line sees it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from executor.apply import end_all, end_leases, settle
from executor.aws.home import fleet_of_home, forget_scenarios
from executor.deployment import withdraw
from executor.fleet import Fleet, TransientError
from executor.home import HomeFiles
from executor.lease_store import SqliteLeaseStore
from executor.local import LocalFleet
from executor.nodes_file import StartUp
from executor.simulated import FILE as SIMULATED
from executor.simulated import SimulatedFleet
from planner.errors import CoralError, InputError
from planner.leases import Lease, LeaseState
from tasks.home import open_catalog
from tasks.operating import fleet_lock, lease_store
from tasks.progress import report
from tasks.start_ups import PARTS, median_parts

END_S = 300.0
COMING_UP = {LeaseState.LAUNCHING, LeaseState.RUNNING}


class UnknownLeaseError(InputError):
    """No lease, or several, of that name."""


class StillRunningError(CoralError):
    """Nodes that were told to end, and that their cloud still lists."""


COLUMNS = ["lease", "state", "domain", "market", "instance type", "node class", "$/h", "ready at",
           "replica"]  # fmt: skip


def list_fleet(
    home: str | None, everything: bool = False
) -> tuple[list[str], list[tuple[object, ...]]]:
    """Nodes (that are not over), oldest first. It looks at no cloud and writes nothing."""
    now = datetime.now(UTC)
    leases = lease_store(open_catalog(home)).all()
    return COLUMNS, [
        (
            lease.id[:8],
            LeaseState.READY.value
            if lease.ready_at and lease.ready_at <= now and lease.state in COMING_UP
            else lease.state.value,
            lease.domain,
            lease.market.value,
            lease.instance_type,
            lease.node_class,
            lease.price_usd_per_hour,
            lease.ready_at.isoformat(timespec="seconds") if lease.ready_at else None,
            lease.replica[:8] if lease.replica else None,
        )
        for lease in leases
        if everything or not lease.state.is_over
    ]


def show_lease(
    home: str | None, name: str
) -> tuple[dict[str, object], list[str], list[tuple[object, ...]]]:
    """A lease's facts, and its events as a table.

    Raises UnknownLeaseError.
    """
    store = lease_store(open_catalog(home))
    lease = _named(store, name)
    facts = {key: str(value) for key, value in asdict(lease).items() if value is not None}
    return {**facts, "token": lease.token}, ["at", "state", "reason"], [*store.events(lease.id)]


def list_start_ups(home: str | None) -> tuple[list[str], list[tuple[object, ...]]]:
    """Seconds that start-ups took, part by part: medians by instance type."""
    kinds: dict[str, list[StartUp]] = {}
    for found in lease_store(open_catalog(home)).start_ups():
        kinds.setdefault(found.instance_type, []).append(found)
    columns = ["instance type", "nodes", *(f"{part} s" for part in PARTS), "all s"]
    rows = [(kind, len(mine), *median_parts(mine)) for kind, mine in sorted(kinds.items())]
    return columns, [*rows]


def end_one(
    home: str | None, name: str, *, drain: bool, sleep: Callable[[float], None] = time.sleep
) -> Lease:
    """Drain or terminate one node; the lease as it is then.

    Raises UnknownLeaseError; FleetBusyError: a round is at work.
    """
    catalog = open_catalog(home)
    with fleet_lock(catalog):
        store, now = lease_store(catalog), datetime.now(UTC)
        lease = _named(store, name)
        if lease.state.is_over:
            return lease
        fleet = next(one for one in fleets_of(catalog.home) if one.kind == lease.fleet)
        if drain and lease.state is LeaseState.READY:
            lease = lease.to(LeaseState.DRAINING, "coral fleet drain")
            store.save(lease, now)
            withdraw(HomeFiles(catalog.home).deployment, lease.id)  # requests go elsewhere
            sleep(fleet.drain_s)
        if not drain and isinstance(fleet, LocalFleet):
            fleet = replace(fleet, drains=False)
        reason = f"coral fleet {'drain' if drain else 'terminate'}"
        end_leases(store, fleet, [lease], now, reason)
        settle(store, fleet, now)
        return _named(store, lease.id)


def sweep(home: str | None) -> list[str]:
    """Settle every fleet of the home; what changed, in words.

    Raises FleetBusyError: a round is at work.
    """
    catalog, now = open_catalog(home), datetime.now(UTC)
    with fleet_lock(catalog):
        store = lease_store(catalog)
        before = {lease.id: lease.state for lease in store.all()}
        ended: dict[str, None] = {}  # each once, in order
        for fleet in fleets_of(catalog.home):
            settle(store, fleet, now, told=lambda name: ended.update({name: None}))
        changed = [
            f"lease {lease.id[:8]}: {before[lease.id]} -> {lease.state} {lease.reason}".rstrip()
            for lease in store.all()
            if lease.state is not before[lease.id]
        ]
        return [*changed, *(f"instance {name} ended" for name in ended)]


def _named(store: SqliteLeaseStore, name: str) -> Lease:
    found = [lease for lease in store.all() if lease.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownLeaseError(f"{len(found)} leases begin with {name!r}; give more of the id")
    raise UnknownLeaseError(f"no lease {name!r}; `coral fleet list --all` shows them")


def count_running(home: str | None) -> int:
    """Nodes that are not over."""
    leases = lease_store(open_catalog(home)).all()
    return sum(not lease.state.is_over for lease in leases)


def end_fleet(home: str | None, scenario: str | None = None, patience_s: float = END_S) -> int:
    """Terminate every node (of a scenario) of every fleet; how many there were.

    Raises StillRunningError: a cloud still lists some when the patience is over.
    """
    catalog = open_catalog(home)
    with fleet_lock(catalog):
        store, now = lease_store(catalog), datetime.now(UTC)
        store.save_replicas(
            [replace(replica, ended_at=now) for replica in store.replicas(scenario)]
        )
        mine = [
            lease
            for lease in store.all()
            if not lease.state.is_over and scenario in {None, lease.scenario}
        ]
        fleets = fleets_of(catalog.home)
        LocalFleet(catalog.home).clear()
        for fleet in fleets:
            with contextlib.suppress(TransientError):  # it is asked again while waiting
                end_all(store, fleet, [x for x in mine if x.fleet == fleet.kind], now)
        _wait_ended(store, fleets, {lease.id for lease in mine}, patience_s)
        if scenario is None:
            forget_scenarios(HomeFiles(catalog.home))
    return len(mine)


def _wait_ended(
    store: SqliteLeaseStore, fleets: Sequence[Fleet], lease_ids: Set[str], patience_s: float
) -> None:
    """Until every cloud says so.

    Raises StillRunningError.
    """
    ends = time.monotonic() + patience_s
    while True:
        left = [x for x in store.all() if x.id in lease_ids and not x.state.is_over]
        if not left:
            return
        if time.monotonic() > ends:
            names = ", ".join(x.instance_id or f"lease {x.id[:8]}" for x in left[:5])
            raise StillRunningError(
                f"{len(left)} nodes are not gone after {patience_s:.0f} s ({names}); "
                "run `coral down` again, and look at the cloud's console"
            )
        report("nodes that are gone", len(lease_ids) - len(left), len(lease_ids))
        time.sleep(min(1.0, patience_s / 10))
        for kind in {lease.fleet for lease in left}:
            for fleet in fleets:
                if fleet.kind == kind:
                    with contextlib.suppress(TransientError):
                        settle(store, fleet, datetime.now(UTC))


def fleets_of(home: Path) -> list[Fleet]:
    """Every kind that may have nodes of this home, to see and to end them."""
    on_aws = fleet_of_home(HomeFiles(home))
    return [SimulatedFleet(path=home / SIMULATED), LocalFleet(home), *([on_aws] if on_aws else [])]

"""The fleet as the command line sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from executor.apply import ALL_DOWN, end_all, settle
from executor.fleet import NoCapacityError
from executor.local import LOCAL_PREFIX, LocalFleet
from planner.leases import Lease, LeaseState
from tasks.home import open_catalog
from tasks.operating import fleet_lock, lease_store

COLUMNS = ["lease", "state", "domain", "market", "instance type", "node class", "$/h", "ready at",
           "replica"]  # fmt: skip


def list_fleet(home: str | None) -> tuple[list[str], list[tuple[object, ...]]]:
    """Nodes that are not over, as of now, oldest first. Only `operate` and `down` write."""
    now = datetime.now(UTC)
    leases = lease_store(open_catalog(home)).all()
    return COLUMNS, [
        (
            lease.id[:8],
            LeaseState.READY.value
            if lease.ready_at and lease.ready_at <= now and lease.state is LeaseState.LAUNCHING
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
        if not lease.state.is_over
    ]


def count_running(home: str | None) -> int:
    """Nodes that are not over."""
    leases = lease_store(open_catalog(home)).all()
    return sum(not lease.state.is_over for lease in leases)


def end_fleet(home: str | None, scenario: str | None = None) -> int:
    """Terminate every node (of a scenario), simulated or of this machine; how many there were."""
    catalog, now = open_catalog(home), datetime.now(UTC)
    fleet = AnyFleet(LocalFleet(catalog.home))
    with fleet_lock(catalog):
        store = lease_store(catalog)
        store.save_replicas(
            [replace(replica, ended_at=now) for replica in store.replicas(scenario)]
        )
        fleet.local.clear()
        return end_all(store, fleet, settle(store, fleet, now, scenario), now)


@dataclass(frozen=True)
class AnyFleet:
    """Ends nodes of whichever fleet launched them; launches none."""

    local: LocalFleet

    def launch(self, lease: Lease, now: datetime) -> tuple[str, datetime]:
        """Raises NoCapacityError: what an interrupted round planned is not begun any more."""
        raise NoCapacityError(ALL_DOWN)

    def terminate(self, instance_id: str) -> None:
        if instance_id.startswith(LOCAL_PREFIX):
            self.local.terminate(instance_id)

    def is_gone(self, instance_id: str) -> bool:
        return instance_id.startswith(LOCAL_PREFIX) and self.local.is_gone(instance_id)

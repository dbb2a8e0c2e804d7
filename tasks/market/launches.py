"""What became of launches, from leases into the catalog: each end updates what is known of stock.

Leases are the durable record; this can be run at any time, and again.
"""

from __future__ import annotations

from collections.abc import Iterable

from catalog.market.reads import read_recorded
from catalog.market.writes import record_launches
from catalog.store import Catalog
from executor.apply import REFUSED
from executor.home import HomeFiles
from executor.lease_store import SqliteLeaseStore
from planner.availability import LaunchOutcome, LaunchResult
from planner.catch_up import was_taken
from planner.leases import Lease, LeaseState
from planner.site import CLOUD as LOCAL
from planner.types import Market


def remember_launches(catalog: Catalog) -> int:
    """Take in what the leases of a home say that the catalog does not know yet; how much it was."""
    path = HomeFiles(catalog.home).leases
    if not path.exists():
        return 0
    found = results_of(SqliteLeaseStore(path).all())
    with catalog.read() as connection:
        known = read_recorded(connection)
    new = [one for one in found if (one.lease_id, one.outcome) not in known]
    return record_results(catalog, new)


def record_results(catalog: Catalog, results: Iterable[LaunchResult]) -> int:
    """Keep what a fleet saw of launches; how many were new."""
    listed = list(results)
    if not listed:
        return 0
    with catalog.write() as connection:
        return record_launches(connection, listed)


def results_of(leases: Iterable[Lease]) -> list[LaunchResult]:
    """Launches that came up, those that found no capacity, and spot nodes that were taken away."""
    found = []
    for lease in leases:
        if lease.domain.startswith(f"{LOCAL}:"):
            continue  # nodes of this machine tell nothing of a market
        if lease.instance_id is not None:
            found.append(_result(lease, LaunchOutcome.LAUNCHED))
            spot = lease.market is Market.SPOT
            if spot and was_taken(lease):
                found.append(_result(lease, LaunchOutcome.PREEMPTED))
        elif lease.state is LeaseState.FAILED and not lease.reason.startswith(REFUSED):
            found.append(_result(lease, LaunchOutcome.NO_CAPACITY))
    return found


def _result(lease: Lease, outcome: LaunchOutcome) -> LaunchResult:
    ended = None if outcome is LaunchOutcome.LAUNCHED else lease.ended_at
    return LaunchResult(
        lease_id=lease.id,
        at=ended or lease.created_at,
        domain=lease.domain,
        zone=lease.zone,
        instance_type=lease.instance_type,
        market=lease.market,
        outcome=outcome,
        detail="" if outcome is LaunchOutcome.LAUNCHED else lease.reason,
    )

"""What the fleet's own file says of leases, copied into the catalog for analysts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import polars as pl

from catalog.fleet import clear_leases, read_last_event, write_leases
from catalog.store import Catalog
from executor.home import HomeFiles
from executor.lease_store import SqliteLeaseStore

TIME = pl.Datetime("us", "UTC")
LEASES: Mapping[str, Any] = {
    "lease_id": pl.String, "scenario": pl.String, "domain": pl.String, "zone": pl.String,
    "instance_type": pl.String, "node_class": pl.String, "market": pl.String,
    "price_usd_per_hour": pl.Float64, "fleet": pl.String, "state": pl.String,
    "reason": pl.String, "replica_id": pl.String, "instance_id": pl.String,
    "created_at": TIME, "ready_at": TIME, "ended_at": TIME,
}  # fmt: skip
EVENTS: Mapping[str, Any] = {
    "number": pl.Int64, "lease_id": pl.String, "happened_at": TIME, "state": pl.String,
    "reason": pl.String,
}  # fmt: skip


class LeaseEvent(NamedTuple):
    """One change of a node's state."""

    number: int
    lease_id: str
    happened_at: datetime
    state: str
    reason: str


def copy_leases(catalog: Catalog) -> list[LeaseEvent]:
    """Take in what changed since the last time; these events, oldest first.

    All of it where the file is another one than before: lost, or an older one put back.
    """
    path = HomeFiles(catalog.home).leases
    if not path.exists():
        return []
    store = SqliteLeaseStore(path)
    with catalog.write() as connection:  # one at a time: two rounds would take in the same
        last = read_last_event(connection)
        events = [LeaseEvent(*event) for event in store.events_since(last[0] - 1 if last else 0)]
        if last and (not events or events[0][:3] != last):
            clear_leases(connection)
            events = [LeaseEvent(*event) for event in store.events_since(0)]
        elif last:
            events = events[1:]
        if not events:
            return []
        changed = {event.lease_id for event in events}
        rows = [
            (
                x.id, x.scenario, x.domain, x.zone, x.instance_type, x.node_class, x.market.value,
                x.price_usd_per_hour, x.fleet, x.state.value, x.reason, x.replica, x.instance_id,
                x.created_at, x.ready_at, x.ended_at,
            )
            for x in store.some(changed)
        ]  # fmt: skip
        write_leases(
            connection,
            pl.DataFrame(rows, LEASES, orient="row"),
            pl.DataFrame(events, EVENTS, orient="row"),
        )
    return events

"""Leases in SQLite (WAL): several processes, crash-safe, no lock for readers."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from planner.errors import InputError
from planner.leases import Lease, LeaseState
from planner.replicas import Replica
from planner.types import Market

BUSY_TIMEOUT_S = 10.0
COLUMNS = (
    "id, domain, instance_type, node_class, market, price_usd_per_hour, state, created_at, zone, "
    "instance_id, ready_at, ended_at, reason, scenario, replica"
)


class LeaseStoreError(InputError):
    """The lease file cannot be used."""


@dataclass(frozen=True)
class SqliteLeaseStore:
    """Current state of every lease, and an event row for every change."""

    path: Path

    def all(self) -> list[Lease]:
        """Every lease ever written, oldest first."""
        with self._connect() as connection:
            rows = connection.execute(
                f"SELECT {COLUMNS} FROM lease ORDER BY created_at, id"
            ).fetchall()
        return [_lease(row) for row in rows]

    def save(self, lease: Lease, at: datetime) -> None:
        """Write a lease's new state and the event that led to it, in one transaction."""
        values = (
            lease.id, lease.domain, lease.instance_type, lease.node_class, lease.market.value,
            lease.price_usd_per_hour, lease.state.value, lease.created_at.isoformat(), lease.zone,
            lease.instance_id, _text(lease.ready_at), _text(lease.ended_at), lease.reason,
            lease.scenario, lease.replica,
        )  # fmt: skip
        with self._connect() as connection:
            marks = ", ".join("?" * len(values))
            connection.execute(f"INSERT OR REPLACE INTO lease ({COLUMNS}) VALUES ({marks})", values)
            connection.execute(
                "INSERT INTO lease_event (lease_id, at, state, reason) VALUES (?, ?, ?, ?)",
                (lease.id, at.isoformat(), lease.state.value, lease.reason),
            )

    def replicas(self, scenario: str | None = None) -> list[Replica]:
        """Replicas (of a scenario) that did not end, oldest first."""
        with self._connect() as connection:
            rows = connection.execute(
                "SELECT id, scenario, template_id, domain, started_at FROM replica "
                "WHERE (? IS NULL OR scenario = ?) AND ended_at IS NULL ORDER BY started_at, id",
                (scenario, scenario),
            ).fetchall()
        return [
            Replica(key, whose, template, domain, datetime.fromisoformat(started))
            for key, whose, template, domain, started in rows
        ]

    def save_replicas(self, replicas: Sequence[Replica]) -> None:
        """Write replicas that started or ended, in one transaction."""
        with self._connect() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO replica VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (r.id, r.scenario, r.template_id, r.domain, r.started_at.isoformat(),
                     _text(r.ended_at))
                    for r in replicas
                ],
            )  # fmt: skip

    def events(self, lease_id: str) -> list[tuple[str, str, str]]:
        """(time, state, reason) of a lease, oldest first."""
        with self._connect() as connection:
            return connection.execute(
                "SELECT at, state, reason FROM lease_event WHERE lease_id = ? ORDER BY rowid",
                (lease_id,),
            ).fetchall()

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S)
        except (OSError, sqlite3.Error) as error:
            raise LeaseStoreError(f"cannot open the lease file {self.path}: {error}") from error
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(
                """
                CREATE TABLE IF NOT EXISTS lease (
                    id TEXT PRIMARY KEY, domain TEXT NOT NULL, instance_type TEXT NOT NULL,
                    node_class TEXT NOT NULL, market TEXT NOT NULL,
                    price_usd_per_hour REAL NOT NULL, state TEXT NOT NULL,
                    created_at TEXT NOT NULL, zone TEXT, instance_id TEXT, ready_at TEXT,
                    ended_at TEXT, reason TEXT NOT NULL, scenario TEXT NOT NULL, replica TEXT);
                CREATE TABLE IF NOT EXISTS lease_event (
                    lease_id TEXT NOT NULL, at TEXT NOT NULL, state TEXT NOT NULL,
                    reason TEXT NOT NULL);
                CREATE TABLE IF NOT EXISTS replica (
                    id TEXT PRIMARY KEY, scenario TEXT NOT NULL, template_id TEXT NOT NULL,
                    domain TEXT NOT NULL, started_at TEXT NOT NULL, ended_at TEXT);
                """
            )
            columns = {row[1] for row in connection.execute("PRAGMA table_info(lease)")}
            if "replica" not in columns:  # a file of an earlier Coral
                connection.execute("ALTER TABLE lease ADD COLUMN replica TEXT")
            with connection:
                yield connection
        except sqlite3.DatabaseError as error:
            raise LeaseStoreError(
                f"the lease file {self.path} is damaged or locked ({error}); move it away to start "
                "anew, or choose another home with --home"
            ) from error
        finally:
            connection.close()


def _lease(row: tuple[object, ...]) -> Lease:
    (
        key,
        domain,
        kind,
        node,
        market,
        price,
        state,
        created,
        zone,
        instance,
        ready,
        ended,
        why,
        whose,
        replica,
    ) = row
    return Lease(
        id=str(key),
        domain=str(domain),
        instance_type=str(kind),
        node_class=str(node),
        market=Market(str(market)),
        price_usd_per_hour=float(str(price)),
        state=LeaseState(str(state)),
        created_at=datetime.fromisoformat(str(created)),
        zone=None if zone is None else str(zone),
        instance_id=None if instance is None else str(instance),
        ready_at=_time(ready),
        ended_at=_time(ended),
        reason=str(why),
        scenario=str(whose),
        replica=None if replica is None else str(replica),
    )


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()


def _time(text: object) -> datetime | None:
    return None if text is None else datetime.fromisoformat(str(text))

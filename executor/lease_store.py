"""Leases in SQLite (WAL): several processes, crash-safe, no lock for readers."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from executor.nodes_file import StartUp
from planner.errors import InputError
from planner.leases import Lease, LeaseState
from planner.replicas import Replica
from planner.types import Market

BUSY_TIMEOUT_S = 10.0
COLUMNS = (
    "id, domain, instance_type, node_class, market, price_usd_per_hour, state, created_at, zone, "
    "instance_id, ready_at, ended_at, reason, scenario, replica, fleet, attempt, requested_at, "
    "drain_until"
)
NAMES = COLUMNS.split(", ")
LATER = {  # columns that files of an earlier Coral lack
    "replica": "TEXT",
    "fleet": "TEXT NOT NULL DEFAULT 'simulated'",
    "attempt": "INTEGER NOT NULL DEFAULT 0",
    "requested_at": "TEXT",
    "drain_until": "TEXT",
}
OVER = tuple(state.value for state in LeaseState if state.is_over)

TABLES = """
CREATE TABLE IF NOT EXISTS lease (
    id TEXT PRIMARY KEY, domain TEXT NOT NULL, instance_type TEXT NOT NULL,
    node_class TEXT NOT NULL, market TEXT NOT NULL, price_usd_per_hour REAL NOT NULL,
    state TEXT NOT NULL, created_at TEXT NOT NULL, zone TEXT, instance_id TEXT, ready_at TEXT,
    ended_at TEXT, reason TEXT NOT NULL, scenario TEXT NOT NULL, replica TEXT,
    fleet TEXT NOT NULL, attempt INTEGER NOT NULL, requested_at TEXT, drain_until TEXT);
CREATE TABLE IF NOT EXISTS lease_event (
    lease_id TEXT NOT NULL, at TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS replica (
    id TEXT PRIMARY KEY, scenario TEXT NOT NULL, template_id TEXT NOT NULL, domain TEXT NOT NULL,
    started_at TEXT NOT NULL, ended_at TEXT);
CREATE TABLE IF NOT EXISTS start_up (
    lease_id TEXT PRIMARY KEY, at TEXT NOT NULL, domain TEXT NOT NULL, instance_type TEXT NOT NULL,
    boot_s REAL NOT NULL, install_s REAL NOT NULL, weights_s REAL NOT NULL, engine_s REAL NOT NULL);
"""


class LeaseStoreError(InputError):
    """The lease file cannot be used."""


@dataclass
class _Over:
    """Leases of one file that are over, as far as they were read: they change no more.

    Whatever is written makes a new row, after all others that there are.
    """

    leases: dict[str, Lease] = field(default_factory=dict)  # by id
    last: int = 0  # the latest row


@dataclass(frozen=True)
class SqliteLeaseStore:
    """Current state of every lease, and an event row for every change."""

    path: Path
    _of_thread: threading.local = field(default_factory=threading.local, compare=False, repr=False)

    def all(self) -> list[Lease]:
        """Every lease ever written, oldest first; those that are over are read once."""
        with self._connect() as connection:
            over: _Over = self._of_thread.over
            rows = connection.execute(
                f"SELECT {COLUMNS}, rowid FROM lease WHERE rowid >= ? OR state NOT IN (?, ?)",
                (over.last, *OVER),
            ).fetchall()
        found = {row[0]: _lease(row[:-1]) for row in rows}
        leases = over.leases | found
        for lease_id, *_, row in rows:
            if found[lease_id].state.is_over:
                over.leases[lease_id], over.last = found[lease_id], max(over.last, row)
        return sorted(leases.values(), key=lambda lease: (lease.created_at, lease.id))

    def save(self, lease: Lease, at: datetime) -> None:
        """Write a lease's new state and the event that led to it, in one transaction."""
        self.save_all([lease], at)

    def save_all(self, leases: Sequence[Lease], at: datetime) -> None:
        """The same of several, all or none."""
        marks = ", ".join("?" * len(NAMES))
        with self._connect() as connection:
            connection.executemany(
                f"INSERT OR REPLACE INTO lease ({COLUMNS}) VALUES ({marks})",
                [_row(lease) for lease in leases],
            )
            connection.executemany(
                "INSERT INTO lease_event (lease_id, at, state, reason) VALUES (?, ?, ?, ?)",
                [(x.id, at.isoformat(), x.state.value, x.reason) for x in leases],
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

    def start_ups(self) -> list[StartUp]:
        """Of nodes that came up whole, oldest first."""
        with self._connect() as connection:
            rows = connection.execute(
                "SELECT lease_id, at, domain, instance_type, boot_s, install_s, weights_s, "
                "engine_s FROM start_up ORDER BY at, lease_id"
            ).fetchall()
        return [StartUp(row[0], datetime.fromisoformat(row[1]), *row[2:]) for row in rows]

    def save_start_ups(self, found: Sequence[StartUp]) -> None:
        """Keep them, each once."""
        with self._connect() as connection:
            connection.executemany(
                "INSERT OR IGNORE INTO start_up VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (x.lease_id, x.at.isoformat(), x.domain, x.instance_type,
                     x.boot_s, x.install_s, x.weights_s, x.engine_s)
                    for x in found
                ],
            )  # fmt: skip

    def events(self, lease_id: str) -> list[tuple[str, str, str]]:
        """(time, state, reason) of a lease, oldest first."""
        with self._connect() as connection:
            return connection.execute(
                "SELECT at, state, reason FROM lease_event WHERE lease_id = ? ORDER BY rowid",
                (lease_id,),
            ).fetchall()

    def events_since(self, number: int) -> list[tuple[int, str, datetime, str, str]]:
        """(number, lease, time, state, reason) of events after the one of that number."""
        with self._connect() as connection:
            rows = connection.execute(
                "SELECT rowid, lease_id, at, state, reason FROM lease_event WHERE rowid > ? "
                "ORDER BY rowid",
                (number,),
            ).fetchall()
        return [(n, key, datetime.fromisoformat(at), *rest) for n, key, at, *rest in rows]

    def some(self, ids: Collection[str]) -> list[Lease]:
        """Those leases, oldest first."""
        with self._connect() as connection:
            rows = connection.execute(
                f"SELECT {COLUMNS} FROM lease WHERE id IN (SELECT value FROM json_each(?)) "
                "ORDER BY created_at, id",
                (json.dumps(list(ids)),),
            ).fetchall()
        return [_lease(row) for row in rows]

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """One transaction, on this thread's connection."""
        connection = self._open()
        try:
            with connection:
                yield connection
        except sqlite3.DatabaseError as error:
            self._forget()
            raise self._unusable(error) from error

    def _open(self) -> sqlite3.Connection:
        """Opened once for each thread, and again where another file is in its place."""
        known = getattr(self._of_thread, "opened", None)
        if known is not None and self._inode() == known[1]:
            opened: sqlite3.Connection = known[0]
            return opened
        self._forget()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S)
        except (OSError, sqlite3.Error) as error:
            raise LeaseStoreError(f"cannot open the lease file {self.path}: {error}") from error
        try:
            _prepare(connection)
        except sqlite3.DatabaseError as error:
            connection.close()
            raise self._unusable(error) from error
        self._of_thread.opened = (connection, self._inode())
        self._of_thread.over = _Over()
        return connection

    def _forget(self) -> None:
        known = getattr(self._of_thread, "opened", None)
        if known is not None:
            known[0].close()
            self._of_thread.opened = None

    def _inode(self) -> int:
        try:
            return self.path.stat().st_ino
        except OSError:
            return 0

    def _unusable(self, error: sqlite3.Error) -> LeaseStoreError:
        if "disk is full" in str(error):
            return LeaseStoreError(
                f"no room left on the disk of {self.path}: nothing was written; free some and run "
                "it again"
            )
        return LeaseStoreError(
            f"the lease file {self.path} is damaged or locked ({error}); move it away to start "
            "anew, or choose another home with --home"
        )


def _prepare(connection: sqlite3.Connection) -> None:
    """Tables, and the columns that a file of an earlier Coral lacks."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(TABLES)
    columns = {row[1] for row in connection.execute("PRAGMA table_info(lease)")}
    for name in LATER.keys() - columns:
        connection.execute(f"ALTER TABLE lease ADD COLUMN {name} {LATER[name]}")
        if name == "fleet":
            connection.execute("UPDATE lease SET fleet = 'local' WHERE instance_id LIKE 'local-%'")
    connection.commit()


def _row(lease: Lease) -> list[Any]:
    """In the order of the columns."""
    values = [getattr(lease, name) for name in NAMES]
    return [value.isoformat() if isinstance(value, datetime) else value for value in values]


def _lease(row: Sequence[Any]) -> Lease:
    found = dict(zip(NAMES, row, strict=True))
    for name in ("created_at", "ready_at", "ended_at", "requested_at", "drain_until"):
        found[name] = None if found[name] is None else datetime.fromisoformat(found[name])
    found["market"], found["state"] = Market(found["market"]), LeaseState(found["state"])
    return Lease(**found)


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()

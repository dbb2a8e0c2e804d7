"""The simulated fleet: a cloud without an account, with start-up delays, failures and preemptions.

What a launch comes to depends on its token alone (hashed with the seed), so a repeated request
gives the same instance and a run can be repeated. What it made is kept in a SQLite file, as a cloud
keeps it: also when the process that asked is killed.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from executor.fleet import Launched, NoCapacityError, launch_in_words
from planner.catch_up import Instance, InstanceState
from planner.leases import Lease
from planner.types import Market

PREFIX = "sim-"
FILE = "simulated-cloud.sqlite"
BUSY_TIMEOUT_S = 10.0
LISTED = timedelta(hours=1)  # after an instance is over
BOOT_SHARE = 0.2  # of its start-up, until an instance runs


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Launches that take `startup_minutes` on average and fail at a rate.

    Without a file it forgets when it is closed.
    """

    startup_minutes: float = 10.0
    failure_rate: float = 0.0
    seed: int = 0
    preemptions_per_hour: float = 0.0  # of a spot node
    path: Path | None = None
    kind: str = "simulated"
    at_once: int = 1
    drain_s: float = 0.0
    _memory: sqlite3.Connection = field(
        default_factory=lambda: sqlite3.connect(":memory:", check_same_thread=False), compare=False
    )

    def launch(self, lease: Lease, now: datetime) -> Launched:
        """Make the instance of the lease's token, or give back the one that is there.

        Raises NoCapacityError: as often as `failure_rate` says.
        """
        token = lease.token
        with self._cloud() as cloud:
            known = cloud.execute(
                "SELECT id, ready_at FROM instance WHERE token = ?", (token,)
            ).fetchone()
            if known is not None:
                return Launched(known[0], datetime.fromisoformat(known[1]))
            if self._draw("fails", token) < self.failure_rate:
                raise NoCapacityError(
                    f"no capacity for {lease.instance_type} in {lease.domain} ({lease.market})"
                )
            # Between 0.6 and 1.4 of the mean: images and weights take different times to arrive.
            minutes = self.startup_minutes * (0.6 + 0.8 * self._draw("delay", token))
            ready_at = now + timedelta(minutes=minutes)
            digest = hashlib.sha256(f"{self.seed}|{token}".encode()).hexdigest()
            instance_id = f"{PREFIX}{digest[:12]}"
            cloud.execute(
                "INSERT INTO instance VALUES (?, ?, ?, ?, ?, ?, NULL)",
                (instance_id, token, lease.id, now.isoformat(), ready_at.isoformat(),
                 self._preempted_at(lease, now)),
            )  # fmt: skip
        return Launched(instance_id, ready_at)

    def terminate(self, instance_id: str) -> None:
        """End an instance; ending one twice, or one that never was, is quiet."""
        with self._cloud() as cloud:
            cloud.execute(
                "UPDATE instance SET ended = 1 WHERE id = ? AND ended IS NULL", (instance_id,)
            )

    def instances(self, now: datetime) -> list[Instance]:
        """All that run, and those that did within an hour before they were launched last."""
        with self._cloud() as cloud:
            rows = cloud.execute(
                "SELECT id, lease_id, launched_at, ready_at, preempted_at, ended FROM instance"
            ).fetchall()
        return [_instance(row, now) for row in rows]

    def elsewhere(self, lease: Lease) -> str | None:
        """None: zones are not simulated."""
        return None

    def calls(self, lease: Lease) -> list[str]:
        """One."""
        return [launch_in_words(lease)]

    def _preempted_at(self, lease: Lease, now: datetime) -> str | None:
        if lease.market is not Market.SPOT or not self.preemptions_per_hour:
            return None
        hours = -math.log(1.0 - self._draw("life", lease.token)) / self.preemptions_per_hour
        return (now + timedelta(hours=hours)).isoformat()

    def _draw(self, what: str, token: str) -> float:
        digest = hashlib.sha256(f"{self.seed}|{what}|{token}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    @contextmanager
    def _cloud(self) -> Iterator[sqlite3.Connection]:
        if self.path is None:
            connection = self._memory
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S)
        try:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS instance (id TEXT PRIMARY KEY, token TEXT UNIQUE, "
                "lease_id TEXT, launched_at TEXT, ready_at TEXT, preempted_at TEXT, ended INTEGER)"
            )
            with connection:
                yield connection
        finally:
            if self.path is not None:
                connection.close()


def _instance(row: tuple[str, str, str, str, str | None, int | None], now: datetime) -> Instance:
    instance_id, lease_id, launched, ready, preempted, ended = row
    launched_at = datetime.fromisoformat(launched)
    boot = BOOT_SHARE * (datetime.fromisoformat(ready) - launched_at)
    if ended or (preempted is not None and datetime.fromisoformat(preempted) <= now):
        state = InstanceState.GONE
    elif now < launched_at + boot:
        state = InstanceState.PENDING
    else:
        state = InstanceState.RUNNING
    return Instance(instance_id, lease_id, state, launched_at)

"""A round as a draft: what it would write and ask, without doing either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from executor.fleet import ONCE, Fleet, Launched
from executor.lease_store import SqliteLeaseStore
from planner.catch_up import Instance, InstanceState
from planner.leases import Lease
from planner.replicas import Replica


@dataclass
class DraftStore:
    """Reads a store, and keeps what is saved to itself."""

    inner: SqliteLeaseStore
    leases: dict[str, Lease] = field(default_factory=dict)
    changed: dict[str, Replica] = field(default_factory=dict)

    def all(self) -> list[Lease]:
        """Every lease as the draft has it."""
        known = {lease.id: lease for lease in self.inner.all()}
        return list({**known, **self.leases}.values())

    def save(self, lease: Lease, at: datetime) -> None:
        """In the draft alone."""
        self.leases[lease.id] = lease

    def save_all(self, leases: Sequence[Lease], at: datetime) -> None:
        """In the draft alone."""
        self.leases.update({lease.id: lease for lease in leases})

    def replicas(self, scenario: str | None = None) -> list[Replica]:
        """Replicas that did not end, as the draft has them."""
        known = {replica.id: replica for replica in self.inner.replicas(scenario)}
        both = {**known, **self.changed}
        return [replica for replica in both.values() if replica.ended_at is None]

    def save_replicas(self, replicas: Sequence[Replica]) -> None:
        """In the draft alone."""
        self.changed.update({replica.id: replica for replica in replicas})


@dataclass
class DraftFleet:
    """Lists what a fleet has; `asked` says what it would have been asked."""

    inner: Fleet
    asked: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def at_once(self) -> int:
        return 1

    @property
    def drain_s(self) -> float:
        return 0.0

    def launch(self, lease: Lease, now: datetime) -> Launched:
        """Note it; it always succeeds."""
        self.asked += [call for call in self.calls(lease) if not self._is_known(call)]
        return Launched(f"draft-{lease.id}")

    def terminate(self, instance_id: str) -> None:
        """Note it, once."""
        if instance_id not in self.ended:
            self.asked.append(f"terminate {instance_id}")
        self.ended.add(instance_id)

    def instances(self, now: datetime) -> list[Instance]:
        """Those of the fleet."""
        return [
            replace(one, state=InstanceState.GONE) if one.id in self.ended else one
            for one in self.inner.instances(now)
        ]

    def elsewhere(self, lease: Lease) -> str | None:
        """None: a draft's launches succeed."""
        return None

    def calls(self, lease: Lease) -> list[str]:
        """Those of the fleet."""
        return self.inner.calls(lease)

    def _is_known(self, call: str) -> bool:
        """Whether it is made once, and is noted already."""
        return call.endswith(ONCE) and call in self.asked

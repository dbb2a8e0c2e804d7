"""One round's move from what runs to what is wanted: who gets which nodes, who stays a while."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from executor.draft import DraftStore
from executor.fleet import Fleet
from executor.lease_store import SqliteLeaseStore
from planner.leases import Actions, Lease
from planner.replicas import Replica, ReplicaChanges, assign
from planner.succession import WAITS, coming, staying
from planner.types import Combination


@dataclass
class Transition:
    """What `apply_actions` asks while nodes are launched and before others leave."""

    store: SqliteLeaseStore | DraftStore
    fleet: Fleet
    scenario: str
    now: datetime
    changes: ReplicaChanges
    actions: Actions
    combinations: Mapping[str, Combination]  # by template id
    hinted: Collection[str]  # leases that their cloud may take soon
    model_of: Mapping[str, str]  # by template id
    deploy: Callable[[Sequence[Replica]], None]
    routed: Collection[str] | None  # replicas that answer; None: none do in this kind of fleet
    late: datetime  # since before then nothing is waited for

    def __post_init__(self) -> None:
        self.made = self.changes
        self.waiting = 0

    def keep(self, held_back: int) -> frozenset[str]:
        """Leases that stay until the replicas that follow theirs serve.

        Where a cap holds launches back, what leaves makes room; only nodes that may be taken, but
        are not yet, stay even then.
        """
        leaving = {lease.id for lease in self.actions.terminate}
        leases = self._leases()
        others = [lease for lease in leases if lease.id not in leaving]
        wanted = (*self.changes.kept, *self.changes.started)
        models = {
            self.model_of.get(replica.template_id, "")
            for replica in coming(wanted, self.combinations, others, self.routed, self.late)
        }
        stay = staying(self.changes.ended, models, self.model_of, leases, leaving)
        if held_back:
            shaken = {lease.replica for lease in leases if lease.id in self.hinted}
            stay = [replica for replica in stay if replica.id in shaken]
        names = {replica.id for replica in stay}
        self.waiting = len(stay)
        self.made = ReplicaChanges(
            (*self.changes.kept, *stay),
            self.changes.started,
            tuple(replica for replica in self.changes.ended if replica.id not in names),
        )
        kept = [lease for lease in leases if lease.replica in names and lease.id in leaving]
        ids = frozenset(lease.id for lease in kept)
        said = [replace(lease, reason=WAITS) for lease in kept if lease.reason != WAITS]
        unsaid = [
            replace(lease, reason="")
            for lease in leases
            if lease.reason == WAITS and lease.state.is_held and lease.id not in ids
        ]
        self.store.save_all([*said, *unsaid], self.now)
        return ids

    def between(self, failed: int) -> None:
        """Replicas get their nodes, and are deployed where there is something to start."""
        if failed:  # nothing is terminated, so nothing ends: it may be all that serves
            stay = [replace(replica, ended_at=None) for replica in self.made.ended]
            self.made = ReplicaChanges((*self.made.kept, *stay), self.made.started, ())
        self.store.save_replicas((*self.made.started, *self.made.ended))
        present = [
            replica
            for replica in (*self.made.kept, *self.made.started)
            if replica.template_id in self.combinations
        ]
        self.store.save_all(assign(present, self.combinations, self._leases()), self.now)
        self.deploy(present)

    def _leases(self) -> list[Lease]:
        return [lease for lease in self.store.all() if lease.scenario == self.scenario]

"""One round's move from what runs to what is wanted: who gets which nodes, who stays a while."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from executor.apply import Caps
from executor.draft import DraftStore
from executor.lease_store import SqliteLeaseStore
from planner.allocation.problem import AllocationInput
from planner.leases import Actions, Lease, LeaseState
from planner.replicas import Replica, ReplicaChanges, assign
from planner.succession import WAITS, coming, serving, shortfall_rps, staying
from planner.types import Combination, Offer

ENDING = {LeaseState.DRAINING, LeaseState.TERMINATING}


@dataclass
class Transition:
    """What `apply_actions` asks while nodes are launched and before others leave."""

    store: SqliteLeaseStore | DraftStore
    scenario: str
    now: datetime
    data: AllocationInput
    changes: ReplicaChanges  # those that end in the order of `going_order`
    actions: Actions
    combinations: Mapping[str, Combination]  # by template id
    hinted: Collection[str]  # leases that their cloud may take soon
    model_of: Mapping[str, str]  # by template id
    deploy: Callable[[Sequence[Replica]], None]
    routed: Collection[str] | None  # replicas that answer; None: none do in this kind of fleet
    late: datetime  # since before then nothing is waited for
    caps: Caps

    def __post_init__(self) -> None:
        self.made = self.changes
        self.waiting = 0
        self.short_rps: Mapping[str, float] = {}  # by workload, until what comes up serves
        self._serving = serving(self._all, self.combinations, self._leases(), self.routed)

    def keep(self, held_back: Sequence[Offer]) -> frozenset[str]:
        """Leases that stay until the replicas that follow theirs serve.

        Where a cap holds launches back as many leave as make room for them, what loses least first;
        nodes that may be taken, but are not yet, stay even then.
        """
        leaving = {lease.id for lease in self.actions.terminate}
        leases = self._leases()
        others = [lease for lease in leases if lease.id not in leaving]
        models = {
            self.model_of.get(replica.template_id, "")
            for replica in coming(self._wanted, self.combinations, others, self.routed, self.late)
        }
        stay = staying(self.changes.ended, models, self.model_of, leases, leaving)
        shaken = {lease.replica for lease in leases if lease.id in self.hinted}
        movable = [replica for replica in stay if replica.id not in shaken]
        gone = {replica.id for replica in self._making_room(held_back, movable, shaken)}
        stay = [replica for replica in stay if replica.id not in gone]
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
        here = {replica.id for replica in self.made.kept}
        left = [replica for replica in self._serving if replica.id in here]
        self.short_rps = shortfall_rps(self.data, self._serving, left, self._wanted)
        self.deploy(present)

    @property
    def _wanted(self) -> Sequence[Replica]:
        return (*self.changes.kept, *self.changes.started)

    @property
    def _all(self) -> Sequence[Replica]:
        """That there were before the round."""
        return (*self.changes.kept, *self.changes.ended)

    def _making_room(
        self, offers: Sequence[Offer], movable: Sequence[Replica], fixed: Collection[str | None]
    ) -> Sequence[Replica]:
        """The first of these replicas, as many as must go so that as many offers fit as can."""
        ending = {lease.id for lease in self.actions.terminate}
        billing = [x for x in self.store.all() if not (x.state.is_over or x.state in ENDING)]

        def fitting(count: int) -> int:
            stay = {*fixed, *(replica.id for replica in movable[count:])}
            left = [x for x in billing if x.id not in ending or x.replica in stay]
            return len(self.caps.fit(offers, left, self.now))

        most = fitting(len(movable))
        return movable[: next(n for n in range(len(movable) + 1) if fitting(n) == most)]

    def _leases(self) -> list[Lease]:
        return [lease for lease in self.store.all() if lease.scenario == self.scenario]

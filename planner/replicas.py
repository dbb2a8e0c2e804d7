"""Replicas with names: which of them stay, start and end when a plan follows another.

A plan counts replicas; what runs has an identity (its nodes, its loaded weights, its requests). Of
a template's replicas in a domain as many stay as the new plan has; of a surplus the youngest end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from planner.leases import Lease, LeaseState
from planner.types import Combination

ReplicaKey = tuple[str, str]  # template id, domain


@dataclass(frozen=True, slots=True)
class Replica:
    """One running template."""

    id: str
    scenario: str
    template_id: str
    domain: str
    started_at: datetime
    ended_at: datetime | None = None

    @property
    def key(self) -> ReplicaKey:
        return (self.template_id, self.domain)


@dataclass(frozen=True, slots=True)
class ReplicaChanges:
    """What becomes of the replicas."""

    kept: tuple[Replica, ...]
    started: tuple[Replica, ...]
    ended: tuple[Replica, ...]


def follow(
    running: Sequence[Replica],
    wanted: Mapping[ReplicaKey, int],
    scenario: str,
    now: datetime,
    new_id: Callable[[], str],
) -> ReplicaChanges:
    """Who stays, starts and ends. The same counts again change nothing."""
    by_key: dict[ReplicaKey, list[Replica]] = defaultdict(list)
    for replica in sorted(running, key=lambda r: (r.started_at, r.id)):
        by_key[replica.key].append(replica)
    kept, started, ended = [], [], []
    for key in sorted(by_key.keys() | wanted.keys()):
        mine, count = by_key[key], wanted.get(key, 0)
        kept += mine[:count]
        ended += [replace(replica, ended_at=now) for replica in mine[count:]]
        started += [Replica(new_id(), scenario, *key, now) for _ in range(count - len(mine))]
    return ReplicaChanges(tuple(kept), tuple(started), tuple(ended))


def standing(
    replicas: Sequence[Replica], combinations: Mapping[str, Combination], leases: Sequence[Lease]
) -> Mapping[ReplicaKey, int]:
    """Replicas that have all their nodes, by template and domain."""
    nodes = Counter((lease.replica, lease.node_class) for lease in leases if lease.state.is_held)
    return Counter(
        replica.key
        for replica in replicas
        if replica.template_id in combinations
        and all(
            nodes[replica.id, name] >= count for name, count in combinations[replica.template_id]
        )
    )


def scattered(
    replicas: Sequence[Replica],
    combinations: Mapping[str, Combination],
    leases: Sequence[Lease],
    late: datetime,
) -> Mapping[Replica, frozenset[str]]:
    """Replicas that lack ready nodes, and did so before `late`, with the node classes that lack.

    Of one that never had all the time since it started counts, of one that lost a node the time
    since then. A replica comes together or not at all: what it has bills and serves nothing.
    """
    ready = Counter(
        (lease.replica, lease.node_class) for lease in leases if lease.state is LeaseState.READY
    )
    lost: dict[str, datetime] = {}
    for lease in leases:
        if lease.replica is not None and _was_lost(lease) and lease.ended_at is not None:
            lost[lease.replica] = max(lease.ended_at, lost.get(lease.replica, lease.ended_at))
    found = {}
    for replica in replicas:
        since = max(replica.started_at, lost.get(replica.id, replica.started_at))
        lacks = frozenset(
            name
            for name, count in combinations.get(replica.template_id, ())
            if ready[replica.id, name] < count
        )
        if lacks and since < late:
            found[replica] = lacks
    return found


def _was_lost(lease: Lease) -> bool:
    """Over after it was ready; one that never came up does not count."""
    ready, ended = lease.ready_at, lease.ended_at
    return lease.state.is_over and ready is not None and ended is not None and ready <= ended


def assign(
    replicas: Sequence[Replica], combinations: Mapping[str, Combination], leases: Sequence[Lease]
) -> list[Lease]:
    """Held leases with the replica that each serves; only those whose replica changes.

    A lease stays with its replica. Free ones go to replicas that lack nodes, the oldest replica and
    the oldest lease first, ready ones before others. `combinations` is by template id.
    """
    held = [lease for lease in leases if lease.state.is_held]
    needed = {replica.id: dict(combinations[replica.template_id]) for replica in replicas}
    free: list[Lease] = []
    for lease in sorted(held, key=lambda item: (item.created_at, item.id)):
        lacks = needed.get(lease.replica or "", {})
        if lacks.get(lease.node_class, 0) > 0:
            lacks[lease.node_class] -= 1
        else:
            free.append(lease)
    changed = []
    free.sort(key=lambda lease: lease.ready_at is None)
    for replica in sorted(replicas, key=lambda r: (r.started_at, r.id)):
        for name, count in needed[replica.id].items():
            fits = [x for x in free if x.domain == replica.domain and x.node_class == name][:count]
            for lease in fits:
                free.remove(lease)
                changed.append(replace(lease, replica=replica.id))
    changed += [replace(lease, replica=None) for lease in free if lease.replica is not None]
    return changed

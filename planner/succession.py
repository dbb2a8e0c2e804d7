"""Make before break: replicas that a plan ends serve on until those that follow them do.

Pure. Only replicas stay whose nodes the plan gives up anyway: where it uses them for others, there
is nothing to stay on. Formulation, section 11.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from planner.leases import Lease, LeaseState
from planner.replicas import Replica, assign
from planner.types import Combination

WAITS = "it leaves when its successor serves"


def coming(
    wanted: Sequence[Replica],
    combinations: Mapping[str, Combination],
    leases: Sequence[Lease],
    routed: Collection[str] | None,
    late: datetime,
) -> list[Replica]:
    """Wanted replicas that do not serve yet, with the nodes that they are about to get.

    `routed` has those that answer; None: nothing answers in this kind of fleet, nodes that are
    ready are enough. One that is whole since before `late` and does not answer is not waited for.
    """
    known = [replica for replica in wanted if replica.template_id in combinations]
    given = {lease.id: lease for lease in assign(known, combinations, leases)}
    ready = [
        lease
        for lease in (given.get(lease.id, lease) for lease in leases)
        if lease.state is LeaseState.READY
    ]
    counts = Counter((lease.replica, lease.node_class) for lease in ready)

    def comes(replica: Replica) -> bool:
        nodes = combinations[replica.template_id]
        if any(counts[replica.id, name] < count for name, count in nodes):
            return True
        if routed is None or replica.id in routed:
            return False
        times = [lease.ready_at for lease in ready if lease.replica == replica.id]
        return max([replica.started_at, *filter(None, times)]) >= late

    return [replica for replica in known if comes(replica)]


def staying(
    ended: Sequence[Replica],
    models: Collection[str],
    model_of: Mapping[str, str],
    leases: Sequence[Lease],
    leaving: Collection[str],
) -> list[Replica]:
    """Of replicas that end, those that stay for now.

    `models` are those that replicas come up for, `model_of` is by template id, `leaving` are the
    leases that the plan gives up.
    """
    nodes: dict[str, list[Lease]] = defaultdict(list)
    for lease in leases:
        if lease.replica is not None and lease.state.is_held:
            nodes[lease.replica].append(lease)
    return [
        replace(replica, ended_at=None)
        for replica in ended
        if model_of.get(replica.template_id) in models
        and nodes[replica.id]
        and all(x.state is LeaseState.READY and x.id in leaving for x in nodes[replica.id])
    ]

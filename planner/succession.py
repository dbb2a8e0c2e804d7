"""Make before break: replicas that a plan ends serve on until those that follow them do.

Pure. Only replicas stay whose nodes the plan gives up anyway: where it uses them for others, there
is nothing to stay on, and those go first that lose least. Formulation, section 11.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from planner.allocation.load import share_load
from planner.allocation.options import ServiceRules
from planner.allocation.problem import AllocationInput
from planner.leases import Lease, LeaseState
from planner.replicas import Replica, ReplicaKey, assign
from planner.types import Combination

WAITS = "it leaves when its successor serves"
NEGLIGIBLE_RPS = 1e-3


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


def serving(
    replicas: Sequence[Replica],
    combinations: Mapping[str, Combination],
    leases: Sequence[Lease],
    routed: Collection[str] | None,
) -> list[Replica]:
    """Replicas that have all their nodes ready and answer; `routed` as for `coming`."""
    ready = Counter(
        (lease.replica, lease.node_class) for lease in leases if lease.state is LeaseState.READY
    )
    return [
        replica
        for replica in replicas
        if replica.template_id in combinations
        and (routed is None or replica.id in routed)
        and all(
            ready[replica.id, name] >= count for name, count in combinations[replica.template_id]
        )
    ]


def going_order(
    data: AllocationInput, serve: Sequence[Replica], ended: Sequence[Replica]
) -> list[Replica]:
    """Replicas that end, what loses least first.

    Of those of a template and domain counts what all of them together lose, each an equal part, of
    the weighted demand that can be served now.
    """
    there = {replica.id for replica in serve}
    counts = Counter(replica.key for replica in ended if replica.id in there)
    whole = _weighted(data, serve) if len(counts) > 1 else 0.0
    loss: dict[ReplicaKey, float] = {}
    for key in sorted(counts) if len(counts) > 1 else ():
        gone = {replica.id for replica in ended if replica.key == key}
        left = _weighted(data, [replica for replica in serve if replica.id not in gone])
        loss[key] = (whole - left) / counts[key]
    order = sorted(ended, key=lambda replica: (replica.started_at, replica.id), reverse=True)
    return sorted(order, key=lambda r: (r.id in there, round(loss.get(r.key, 0.0), 6)))


def shortfall_rps(
    data: AllocationInput,
    before: Sequence[Replica],
    after: Sequence[Replica],
    wanted: Sequence[Replica],
) -> dict[str, float]:
    """Requests/s of each workload that cannot be served until what comes up serves.

    Of what could be served `before`, and can be again with all that is `wanted`.
    """
    if {replica.id for replica in before} <= {replica.id for replica in after}:
        return {}
    could, can, will = (_served(data, some) for some in (before, after, wanted))
    found = {name: min(could[name], will[name]) - can[name] for name in can}
    return {name: rps for name, rps in sorted(found.items()) if rps > NEGLIGIBLE_RPS}


def _weighted(data: AllocationInput, replicas: Sequence[Replica]) -> float:
    served = _served(data, replicas)
    return sum(workload.weight * served[workload.name] for workload in data.workloads)


def _served(data: AllocationInput, replicas: Sequence[Replica]) -> Mapping[str, float]:
    """By workload, at most its demand; shares and promises of a plan aside."""
    known = {template.id: index for index, template in enumerate(data.templates)}
    counts = Counter((known[r.template_id], r.domain) for r in replicas if r.template_id in known)
    rules = {name: ServiceRules(domains=rule.domains) for name, rule in data.rules.items()}
    return share_load(replace(data, rules=rules), counts).served_rps

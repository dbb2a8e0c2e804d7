"""One round of operation: where the fleet stands, a plan, and the difference applied."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from filelock import FileLock, Timeout

from catalog import reads
from catalog.store import Catalog
from executor.apply import Applied, Caps, apply_actions, settle
from executor.aws.fleet import AwsFleet
from executor.control.notices import REBALANCE, SPOT
from executor.draft import DraftFleet, DraftStore
from executor.fleet import Fleet
from executor.home import HomeFiles
from executor.lease_store import SqliteLeaseStore
from executor.local import LocalFleet
from executor.notices_file import NodeNotice, read_notices
from executor.routes import RoutesError, read_routes
from executor.simulated import FILE as SIMULATED
from executor.simulated import SimulatedFleet
from planner.allocation.problem import AllocationInput, NodeKey, node_key
from planner.catch_up import NOTICED
from planner.errors import InputError, SolverStoppedError
from planner.leases import NEXT, Lease, LeaseKey, LeaseState, LeaseStore, held_nodes, reconcile
from planner.replan import from_fleet, replan, without_more
from planner.replicas import (
    Replica,
    ReplicaChanges,
    ReplicaKey,
    follow,
    scattered,
    standing,
)
from planner.scenario import ScenarioSpec
from planner.types import Market, Template
from tasks.allocation import allocation_input, conclude, fingerprint, read_library
from tasks.aws_site import aws_fleet
from tasks.coral_task import coral_task
from tasks.corrections import Learned
from tasks.deploying import Wanted, aws_ground, deploy, local_ground
from tasks.inputs import Inputs
from tasks.local_site import check_site, local_fleet
from tasks.market.launches import remember_launches
from tasks.observed import InboxRead
from tasks.report import Decision
from tasks.start_ups import keep_start_ups
from tasks.transition import Transition

LOCK_PATIENCE_S = 5.0


class FleetBusyError(InputError):
    """Another command is moving the same fleet."""


class FleetChangedError(InputError):
    """The scenario names another fleet than the one that its nodes are of."""


@dataclass(frozen=True)
class Round:
    """What one round of operation came to."""

    decision: Decision | None  # None: nothing had changed, so nothing was planned
    applied: Applied
    why: str
    stopped: bool  # no plan before the deadline: the last one stays
    replicas: ReplicaChanges
    cost_usd_per_hour: float  # of the nodes held after it, at today's prices
    nodes: int
    calls: tuple[str, ...] | None = None  # of a draft: what the fleet would be asked
    waiting: int = 0  # replicas that leave once those that follow them serve
    demand: InboxRead = field(default_factory=InboxRead)
    learned: Learned = field(default_factory=Learned)


def lease_store(catalog: Catalog) -> SqliteLeaseStore:
    """The leases of a home folder."""
    return SqliteLeaseStore(catalog.home / "leases.sqlite")


def fleet_of(
    home: Path,
    spec: ScenarioSpec,
    zones: Mapping[LeaseKey, Sequence[str]] | None = None,
    *,
    draft: bool = False,
) -> SimulatedFleet | LocalFleet | AwsFleet:
    """The fleet that the scenario describes; `zones` are those of its offers, best first.

    Raises InputError: it can't run now (no controller, no vLLM, no model, no such cores, no way to
    AWS).
    """
    fleet = spec.fleet
    if fleet.is_aws:
        return aws_fleet(home, spec, zones or {}, draft=draft)
    if fleet.is_local:
        check_site(home, spec)
        return local_fleet(home, fleet)
    return SimulatedFleet(
        fleet.startup_minutes, fleet.failure_rate, fleet.seed, fleet.preemptions_per_hour,
        home / SIMULATED,
    )  # fmt: skip


def caps_of(spec: ScenarioSpec) -> Caps:
    """What no round of the scenario goes beyond."""
    fleet = spec.fleet
    return Caps(fleet.max_usd_per_hour, fleet.max_nodes_per_domain, fleet.max_launches_per_minute)


def operate_once(
    catalog: Catalog, spec: ScenarioSpec, inputs: Inputs, now: datetime, draft: bool = False
) -> Round:
    """Settle leases, plan from where the fleet stands, apply the difference, record.

    With the same input as last time nothing is solved: nothing moves, or what is missing of the
    plan is launched again. A running plan gives way only where the new one serves more, or saves
    at least `operate.least_saving_share` after start-ups, drains and restarts are paid. Where no
    plan is found before the deadline the last one stays. A draft plans, and says what the fleet
    would be asked; it asks nothing and writes no lease.
    Raises FleetBusyError: another round, or `coral down`, is at work on this home.
    SolverStoppedError: no plan before the deadline, and none from before.
    """
    with fleet_lock(catalog):
        store: SqliteLeaseStore | DraftStore = lease_store(catalog)
        fleet: Fleet = fleet_of(catalog.home, spec, inputs.scenario.zones, draft=draft)
        if draft:
            store, fleet = DraftStore(lease_store(catalog)), DraftFleet(fleet)
        name = inputs.scenario.name
        _refuse_other_fleets(store, fleet, name)
        if not draft:
            keep_start_ups(catalog.home, lease_store(catalog))
        noticed = read_notices(HomeFiles(catalog.home).notices).nodes
        leases = _heed_notices(store, noticed, settle(store, fleet, now, name), now)
        market = allocation_input(inputs, read_library(catalog, inputs))
        combinations = {template.id: template.combination for template in market.templates}
        since = now - timedelta(minutes=spec.fleet.gang_minutes)
        late = scattered(store.replicas(name), combinations, leases, since)
        scarce = {(replica.domain, lacks) for replica in late for lacks in late[replica]}
        leases = _give_back(store, list(late), leases, now)
        hinted = _hinted(noticed, leases)
        settled = [lease for lease in leases if lease.id not in hinted]
        allowed = [lease for lease in settled if _is_allowed(lease, spec)]
        running = store.replicas(name)
        data = from_fleet(market, allowed, standing(running, combinations, allowed))
        if scarce:
            data = without_more(data, scarce)
        mark = fingerprint(market)
        last = _last_plan(catalog, name)
        if last is not None and last.fingerprint == mark and not scarce:
            choice = _same(last, held_nodes(settled))
        else:
            choice = _choose(catalog, spec, inputs, data, mark, last, now, applied=not draft)
        changes = _followed(running, choice.replicas, name, now, leases, hinted)
        gone = {replica.id for replica in changes.ended}
        freed = [
            replace(lease, replica=None) if lease.replica in gone else lease for lease in settled
        ]
        offers = {node_key(offer): offer for offer in data.offers}
        models = {w.name: w.model.name for w in inputs.scenario.workloads}
        wanted = {key: count for key, count in choice.nodes.items() if key in offers}
        actions = reconcile(wanted, offers, freed).and_end(
            [lease for lease in leases if lease.id in hinted]
        )
        move = Transition(
            store, fleet, name, now, changes, actions, combinations, hinted,
            {t.id: models[t.workload] for t in market.templates if t.workload in models},
            lambda replicas: _deploy(catalog, fleet, spec, inputs, market.templates, replicas),
            _routed(catalog.home) if isinstance(fleet, LocalFleet | AwsFleet) else None, since,
        )  # fmt: skip
        applied = apply_actions(
            store, fleet, actions, now, name, move.between, caps_of(spec), move.keep
        )
        if not draft:
            remember_launches(catalog)
        cost = _cost(data, held_nodes(_leases_of(store.all(), name)))
        calls = tuple(fleet.asked) if isinstance(fleet, DraftFleet) else None
        return Round(
            choice.decision, applied, choice.why, choice.stopped, move.made, *cost, calls,
            move.waiting,
        )  # fmt: skip


def _refuse_other_fleets(store: LeaseStore, fleet: Fleet, name: str) -> None:
    """A fleet sees its own nodes only; those of another would run on, unseen."""
    others = [
        lease
        for lease in _leases_of(store.all(), name)
        if lease.fleet != fleet.kind and not lease.state.is_over
    ]
    if others:
        raise FleetChangedError(
            f"{len(others)} nodes of {name} run on a {others[0].fleet} fleet and the scenario now "
            f"has a {fleet.kind} one; end them first with `coral down`"
        )


def _hinted(noticed: Mapping[str, NodeNotice], leases: Sequence[Lease]) -> frozenset[str]:
    """Nodes that their cloud may take soon, and those that share a replica with one.

    They serve on and are planned without, so that others are there before a notice comes.
    """
    hints = {name for name, notice in noticed.items() if notice.kind == REBALANCE}
    held = [lease for lease in leases if lease.state.is_held]
    shaken = {lease.replica for lease in held if lease.id in hints} - {None}
    return frozenset(x.id for x in held if x.id in hints or x.replica in shaken)


def _followed(
    running: Sequence[Replica],
    wanted: Mapping[ReplicaKey, int],
    name: str,
    now: datetime,
    leases: Sequence[Lease],
    hinted: Collection[str],
) -> ReplicaChanges:
    """As `follow`, with others in place of those whose nodes may be taken."""
    shaken = {lease.replica for lease in leases if lease.id in hinted}
    steady = [replica for replica in running if replica.id not in shaken]
    found = follow(steady, wanted, name, now, lambda: uuid.uuid4().hex)
    ended = [replace(r, ended_at=now) for r in running if r.id in shaken]
    return replace(found, ended=(*found.ended, *ended))


def _routed(home: Path) -> Collection[str]:
    """Replicas that answer, as the controller says."""
    try:
        return {route.replica_id for route in read_routes(HomeFiles(home).routes).routes}
    except RoutesError:
        return ()


def _heed_notices(
    store: LeaseStore, noticed: Mapping[str, NodeNotice], leases: Sequence[Lease], now: datetime
) -> list[Lease]:
    """Nodes that their cloud is about to take drain until then, and are planned without."""
    found = []
    for lease in leases:
        notice = noticed.get(lease.id)
        spot = notice is not None and notice.kind == SPOT
        if spot and notice is not None and LeaseState.DRAINING in NEXT[lease.state]:
            reason = f"{NOTICED} at {notice.at:%H:%M:%S} UTC"
            lease = lease.to(LeaseState.DRAINING, reason, drain_until=notice.at)
            store.save(lease, now)
        found.append(lease)
    return found


def _give_back(
    store: SqliteLeaseStore | DraftStore,
    late: Sequence[Replica],
    leases: Sequence[Lease],
    now: datetime,
) -> list[Lease]:
    """End replicas that did not come together; their nodes are free for others, or leave."""
    store.save_replicas([replace(replica, ended_at=now) for replica in late])
    gone, kept = {replica.id for replica in late}, []
    for lease in leases:
        held = lease.state.is_held and lease.replica in gone
        kept.append(replace(lease, replica=None) if held else lease)
        if held:
            store.save(kept[-1], now)
    return kept


@dataclass(frozen=True)
class _Choice:
    """The plan that a round follows."""

    decision: Decision | None
    nodes: Mapping[NodeKey, int]
    replicas: Mapping[ReplicaKey, int]
    why: str
    stopped: bool = False


def _last_plan(catalog: Catalog, name: str) -> reads.StoredPlan | None:
    with catalog.read() as connection:
        return reads.read_latest_plan(connection, name)


def _same(last: reads.StoredPlan, held: Mapping[NodeKey, int]) -> _Choice:
    """The last plan, where nothing changed."""
    back = "nothing changed but the fleet, which goes back to its plan"
    why = "nothing changed" if last.nodes == held else back
    return _Choice(None, last.nodes, last.replicas, why)


def _choose(
    catalog: Catalog,
    spec: ScenarioSpec,
    inputs: Inputs,
    data: AllocationInput,
    mark: str,
    last: reads.StoredPlan | None,
    now: datetime,
    *,
    applied: bool,
) -> _Choice:
    """A new plan; the last one where none is found in time."""
    nodes: Mapping[NodeKey, int] = last.nodes if last is not None else data.held
    replicas: Mapping[ReplicaKey, int] = last.replicas if last is not None else {}
    try:
        found = replan(data, replicas, nodes, spec.operate.least_saving_share)
    except SolverStoppedError as error:
        if last is None:
            raise
        return _Choice(None, nodes, replicas, f"{error}; the last plan stays", stopped=True)
    decision = conclude(
        catalog, inputs, data, found.plan, found.homo_joint, mark=mark, applied=applied, at=now
    )
    return _Choice(decision, found.plan.node_counts, found.plan.replica_counts, found.why)


@contextmanager
def fleet_lock(catalog: Catalog) -> Iterator[None]:
    """One at a time: two rounds side by side would each launch the whole difference."""
    catalog.home.mkdir(parents=True, exist_ok=True)
    lock = FileLock(catalog.home / "fleet.lock", timeout=LOCK_PATIENCE_S)
    try:
        lock.acquire()
    except Timeout as error:
        raise FleetBusyError(
            f"another command is moving the fleet of {catalog.home}; wait for it to end"
        ) from error
    try:
        yield
    finally:
        lock.release()


operate_task = coral_task("operate-once", operate_once)


def _is_allowed(lease: Lease, spec: ScenarioSpec) -> bool:
    """Whether the scenario still has room for a node that runs, whatever the market offers."""
    return (
        lease.domain in spec.domains
        and lease.node_class in spec.node_classes
        and (lease.market in spec.markets or lease.market is Market.OWNED)
    )


def _deploy(
    catalog: Catalog,
    fleet: Fleet,
    spec: ScenarioSpec,
    inputs: Inputs,
    templates: Sequence[Template],
    replicas: Sequence[Replica],
) -> None:
    """Tell the controller, where there is one, what is to run, with the loads of the plan."""
    if not isinstance(fleet, LocalFleet | AwsFleet):
        return
    name = inputs.scenario.name
    with catalog.read() as connection:
        plan = reads.read_latest_plan(connection, name)
    held = [lease for lease in lease_store(catalog).all() if lease.state.is_held]
    wanted = Wanted(
        inputs=inputs,
        templates={template.id: template for template in templates},
        replicas=replicas,
        leases=_leases_of(held, name),
        load_rps=plan.load_rps if plan is not None else {},
    )
    if isinstance(fleet, LocalFleet):
        ground = local_ground(fleet, spec, wanted.leases)
    else:
        ground = aws_ground(spec, wanted.leases)
    deploy(catalog.home, wanted, ground, [lease for lease in held if lease.scenario != name])


def _leases_of(leases: Sequence[Lease], scenario: str) -> list[Lease]:
    return [lease for lease in leases if lease.scenario == scenario]


def _cost(data: AllocationInput, held: Mapping[NodeKey, int]) -> tuple[float, int]:
    prices = {node_key(offer): offer.price_usd_per_hour for offer in data.offers}
    cost = sum(prices.get(key, 0.0) * count for key, count in held.items())
    return cost, sum(held.values())

"""One round of operation: where the fleet stands, a plan, and the difference applied."""

from __future__ import annotations

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
from planner.errors import InputError
from planner.leases import (
    NEXT,
    Lease,
    LeaseKey,
    LeaseState,
    LeaseStore,
    held_nodes,
)
from planner.replicas import (
    Replica,
    ReplicaChanges,
    scattered,
)
from planner.scenario import ScenarioSpec
from planner.types import Template
from tasks.allocation import allocation_input, read_library
from tasks.aws_site import admit_networks, aws_fleet
from tasks.coral_task import coral_task
from tasks.corrections import Learned
from tasks.deploying import Wanted, aws_ground, deploy, local_ground
from tasks.inputs import Inputs
from tasks.local_site import check_site, local_fleet
from tasks.market.launches import remember_launches
from tasks.observed import InboxRead
from tasks.report import Decision
from tasks.start_ups import keep_start_ups
from tasks.turn import Turn

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
    short_rps: Mapping[str, float] = field(default_factory=dict)  # by workload, while it moves
    demand: InboxRead = field(default_factory=InboxRead)
    learned: Learned = field(default_factory=Learned)


def lease_store(catalog: Catalog) -> SqliteLeaseStore:
    """The leases of a home folder."""
    return SqliteLeaseStore(HomeFiles(catalog.home).leases)


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
    plan is found before the deadline the last one stays. Where offers have no capacity it is
    planned again without them, in the same round. A draft plans, and says what the fleet would be
    asked; it asks nothing and writes no lease.
    Raises FleetBusyError: another round, or `coral down`, is at work on this home.
    SolverStoppedError: no plan before the deadline, and none from before. UnmakeablePlanError: the
    last plan is to stay, and has nodes that are not to be had.
    """
    with fleet_lock(catalog):
        store: SqliteLeaseStore | DraftStore = lease_store(catalog)
        fleet: Fleet = fleet_of(catalog.home, spec, inputs.scenario.zones, draft=draft)
        asked: list[str] = []
        if isinstance(fleet, AwsFleet):
            asked = admit_networks(catalog.home, fleet, spec, draft=draft)
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
        turn = Turn(
            catalog, spec, inputs, store, now, market,
            running=store.replicas(name),
            hinted=_hinted(noticed, leases),
            scarce=scarce,
            since=since,
            last=_last_plan(catalog, name),
            routed=_routed(catalog.home) if isinstance(fleet, LocalFleet | AwsFleet) else None,
            caps=caps_of(spec),
            deploy=lambda replicas: _deploy(
                catalog, fleet, spec, inputs, market.templates, replicas
            ),
            draft=draft,
        )  # fmt: skip
        applied = apply_actions(
            store, fleet, turn.plan(), now, name, turn.between, caps_of(spec), turn.keep,
            turn.instead,
        )  # fmt: skip
        if not draft:
            remember_launches(catalog)
        cost = _cost(turn.data, held_nodes(_leases_of(store.all(), name)))
        calls = (*asked, *fleet.asked) if isinstance(fleet, DraftFleet) else None
        choice, move = turn.choice, turn.move
        return Round(
            choice.decision, applied, choice.why, choice.stopped, move.made, *cost, calls,
            move.waiting, short_rps=move.short_rps,
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


def _last_plan(catalog: Catalog, name: str) -> reads.StoredPlan | None:
    with catalog.read() as connection:
        return reads.read_latest_plan(connection, name)


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

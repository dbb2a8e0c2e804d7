"""One round of operation: where the fleet stands, a plan, and the difference applied."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout
from prefect import task
from prefect.cache_policies import NO_CACHE

from catalog import reads
from catalog.store import Catalog
from executor.apply import Applied, apply_actions, settle
from executor.lease_store import SqliteLeaseStore
from executor.local import LocalFleet
from executor.simulated import SimulatedFleet
from planner.allocation.problem import AllocationInput, NodeKey, node_key
from planner.errors import InputError, SolverStoppedError
from planner.leases import Lease, held_nodes, reconcile
from planner.replan import from_fleet, replan
from planner.replicas import Replica, ReplicaChanges, ReplicaKey, assign, follow, standing
from planner.scenario import ScenarioSpec
from planner.types import Market, Template
from tasks.allocation import allocation_input, conclude, fingerprint, read_library
from tasks.deploying import Wanted, deploy
from tasks.inputs import Inputs
from tasks.local_site import check_site, local_fleet
from tasks.market.launches import remember_launches
from tasks.report import Decision

LOCK_PATIENCE_S = 5.0


class FleetBusyError(InputError):
    """Another command is moving the same fleet."""


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


def lease_store(catalog: Catalog) -> SqliteLeaseStore:
    """The leases of a home folder."""
    return SqliteLeaseStore(catalog.home / "leases.sqlite")


def fleet_of(home: Path, spec: ScenarioSpec) -> SimulatedFleet | LocalFleet:
    """The fleet that the scenario describes.

    Raises InputError: a local one can't run now (no controller, no vLLM, no model, no such cores).
    """
    fleet = spec.fleet
    if fleet.is_local:
        check_site(home, spec)
        return local_fleet(home, fleet)
    return SimulatedFleet(fleet.startup_minutes, fleet.failure_rate, fleet.seed)


def operate_once(catalog: Catalog, spec: ScenarioSpec, inputs: Inputs, now: datetime) -> Round:
    """Settle leases, plan from where the fleet stands, apply the difference, record.

    With the same input as last time nothing is solved: nothing moves, or what is missing of the
    plan is launched again. A running plan gives way only where the new one serves more, or saves
    at least `operate.least_saving_share` after start-ups, drains and restarts are paid. Where no
    plan is found before the deadline the last one stays.
    Raises FleetBusyError: another round, or `coral down`, is at work on this home.
    SolverStoppedError: no plan before the deadline, and none from before.
    """
    with fleet_lock(catalog):
        store, fleet = lease_store(catalog), fleet_of(catalog.home, spec)
        name = inputs.scenario.name
        leases = settle(store, fleet, now, name)
        market = allocation_input(inputs, read_library(catalog, inputs))
        allowed = [lease for lease in leases if _is_allowed(lease, spec)]
        combinations = {template.id: template.combination for template in market.templates}
        running = store.replicas(name)
        data = from_fleet(market, allowed, standing(running, combinations, allowed))
        choice = _choose(catalog, spec, inputs, market, data, dict(held_nodes(leases)))
        changes = follow(running, choice.replicas, name, now, lambda: uuid.uuid4().hex)
        gone = {replica.id for replica in changes.ended}
        freed = [
            replace(lease, replica=None) if lease.replica in gone else lease for lease in leases
        ]
        offers = {node_key(offer): offer for offer in data.offers}
        wanted = {key: count for key, count in choice.nodes.items() if key in offers}
        made = changes

        def move(failed: int) -> None:
            """Replicas get their nodes; those of a local fleet are deployed."""
            nonlocal made
            made = _nothing_ends(changes) if failed else changes
            store.save_replicas((*made.started, *made.ended))
            present = [r for r in (*made.kept, *made.started) if r.template_id in combinations]
            for lease in assign(present, combinations, _leases_of(store.all(), name)):
                store.save(lease, now)
            if isinstance(fleet, LocalFleet):
                _deploy(catalog, fleet, spec, inputs, market.templates, present)

        actions = reconcile(wanted, offers, freed)
        applied = apply_actions(store, fleet, actions, now, name, move)
        remember_launches(catalog)
        cost = _cost(data, held_nodes(_leases_of(store.all(), name)))
        return Round(choice.decision, applied, choice.why, choice.stopped, made, *cost)


@dataclass(frozen=True)
class _Choice:
    """The plan that a round follows."""

    decision: Decision | None
    nodes: Mapping[NodeKey, int]
    replicas: Mapping[ReplicaKey, int]
    why: str
    stopped: bool = False


def _choose(
    catalog: Catalog,
    spec: ScenarioSpec,
    inputs: Inputs,
    market: AllocationInput,
    data: AllocationInput,
    held: Mapping[NodeKey, int],
) -> _Choice:
    """The last plan where nothing changed or none is found in time; a new one otherwise."""
    with catalog.read() as connection:
        last = reads.read_latest_plan(connection, inputs.scenario.name)
    nodes, replicas = (last.nodes, last.replicas) if last is not None else (held, {})
    mark = fingerprint(market)
    if last is not None and last.fingerprint == mark:
        back = "nothing changed but the fleet, which goes back to its plan"
        return _Choice(None, nodes, replicas, "nothing changed" if nodes == held else back)
    try:
        found = replan(data, replicas, nodes, spec.operate.least_saving_share)
    except SolverStoppedError as error:
        if last is None:
            raise
        return _Choice(None, nodes, replicas, f"{error}; the last plan stays", stopped=True)
    decision = conclude(
        catalog, inputs, data, found.plan, found.homo_joint, mark=mark, applied=True
    )
    return _Choice(decision, found.plan.node_counts, found.plan.replica_counts, found.why)


def _nothing_ends(changes: ReplicaChanges) -> ReplicaChanges:
    """A launch failed, so nothing is terminated: it may be all that serves."""
    stay = [replace(replica, ended_at=None) for replica in changes.ended]
    return ReplicaChanges((*changes.kept, *stay), changes.started, ())


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


operate_task = task(name="operate-once", cache_policy=NO_CACHE)(operate_once)


def _is_allowed(lease: Lease, spec: ScenarioSpec) -> bool:
    """Whether the scenario still has room for a node that runs, whatever the market offers."""
    return (
        lease.domain in spec.domains
        and lease.node_class in spec.node_classes
        and (lease.market in spec.markets or lease.market is Market.OWNED)
    )


def _deploy(
    catalog: Catalog,
    fleet: LocalFleet,
    spec: ScenarioSpec,
    inputs: Inputs,
    templates: Sequence[Template],
    replicas: Sequence[Replica],
) -> None:
    """Tell the controller of a local fleet what is to run, with the loads of the plan followed."""
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
    deploy(fleet, spec, wanted, [lease for lease in held if lease.scenario != name])


def _leases_of(leases: Sequence[Lease], scenario: str) -> list[Lease]:
    return [lease for lease in leases if lease.scenario == scenario]


def _cost(data: AllocationInput, held: Mapping[NodeKey, int]) -> tuple[float, int]:
    prices = {node_key(offer): offer.price_usd_per_hour for offer in data.offers}
    cost = sum(prices.get(key, 0.0) * count for key, count in held.items())
    return cost, sum(held.values())

"""One round of operation: where the fleet stands, a plan, and the difference applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from filelock import FileLock, Timeout
from prefect import task
from prefect.cache_policies import NO_CACHE

from catalog import reads
from catalog.store import Catalog
from executor.apply import Applied, apply_actions, settle
from executor.lease_store import SqliteLeaseStore
from executor.simulated import SimulatedFleet
from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, NodeKey, node_key
from planner.allocation.solve import keep_running
from planner.baselines.homo_joint import (
    better_of,
    plan_homo_joint,
    plan_never_worse,
    with_bound_of,
)
from planner.errors import InputError
from planner.leases import Lease, held_nodes, reconcile
from planner.scenario import ScenarioSpec
from tasks.allocation import allocation_input, conclude, fingerprint, read_library
from tasks.inputs import Inputs
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
    cost_usd_per_hour: float  # of the nodes held after it, at today's prices
    nodes: int


def lease_store(catalog: Catalog) -> SqliteLeaseStore:
    """The leases of a home folder."""
    return SqliteLeaseStore(catalog.home / "leases.sqlite")


def simulated_fleet(spec: ScenarioSpec) -> SimulatedFleet:
    """The fleet that the scenario describes."""
    return SimulatedFleet(**spec.fleet.model_dump())


def operate_once(catalog: Catalog, spec: ScenarioSpec, inputs: Inputs, now: datetime) -> Round:
    """Settle leases, plan from where the fleet stands, apply the difference, record.

    With the same input as last time nothing is solved: nothing moves, or what is missing of the
    plan is launched again. A running plan gives way only where the new one serves more, or saves
    at least `operate.least_saving_share` after start-ups and drains are paid.
    Raises FleetBusyError: another round, or `coral down`, is at work on this home.
    """
    with fleet_lock(catalog):
        store, fleet, name = lease_store(catalog), simulated_fleet(spec), inputs.scenario.name
        held = dict(held_nodes(settle(store, fleet, now, name)))
        data = allocation_input(inputs, read_library(catalog, inputs), held)
        with catalog.read() as connection:
            last = reads.read_latest_plan(connection, name)
        decision, wanted, why = None, held, "nothing changed"
        if last is not None and last.fingerprint == fingerprint(data):
            wanted = dict(last.nodes)
            if wanted != held:
                why = "nothing changed but the fleet, which goes back to its plan"
        else:
            running = None if last is None else keep_running(data, last.replicas, last.nodes)
            homo = plan_homo_joint(data)
            plan, why = _choose(data, homo, running, spec.operate.least_saving_share)
            decision = conclude(catalog, inputs, data, plan, homo, applied=True)
            wanted = {node_key(n.offer): n.count for n in plan.nodes}
        offers = {node_key(offer): offer for offer in data.offers}
        actions = reconcile(wanted, offers, _leases_of(store.all(), name))
        applied = apply_actions(store, fleet, actions, now, name)
        running_now = held_nodes(_leases_of(store.all(), name))
        return Round(decision, applied, why, *_cost(data, running_now))


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


def _choose(
    data: AllocationInput, homo: Plan, running: Plan | None, least_saving: float
) -> tuple[Plan, str]:
    if running is None:
        return plan_never_worse(data, homo), "a plan for the fleet as it stands"
    best = plan_never_worse(data, better_of(running, homo))
    tolerance = 1e-4 * max(1.0, data.weighted_demand)
    if running.weighted_shortfall - best.weighted_shortfall > tolerance:
        return best, "the new plan serves more"
    saving = running.objective_usd - best.objective_usd
    if saving > least_saving * running.objective_usd:
        return best, f"the new plan saves ${saving:.2f} over the horizon"
    return with_bound_of(data, running, best), "no other plan saves enough to move"


def _leases_of(leases: Sequence[Lease], scenario: str) -> list[Lease]:
    return [lease for lease in leases if lease.scenario == scenario]


def _cost(data: AllocationInput, held: Mapping[NodeKey, int]) -> tuple[float, int]:
    prices = {node_key(offer): offer.price_usd_per_hour for offer in data.offers}
    cost = sum(prices.get(key, 0.0) * count for key, count in held.items())
    return cost, sum(held.values())

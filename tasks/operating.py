"""One round of operation: where the fleet stands, a plan, and the difference applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

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
from planner.baselines.homo_joint import better_of, plan_homo_joint, plan_never_worse
from planner.leases import held_nodes, reconcile
from planner.scenario import ScenarioSpec
from tasks.allocation import allocation_input, conclude, fingerprint, read_library
from tasks.inputs import Inputs
from tasks.report import Decision


@dataclass(frozen=True)
class Round:
    """What one round of operation came to."""

    decision: Decision | None  # None: nothing had changed, so nothing was planned
    applied: Applied
    why: str
    cost_usd_per_hour: float
    nodes: int


def lease_store(catalog: Catalog) -> SqliteLeaseStore:
    """The leases of a home folder."""
    return SqliteLeaseStore(catalog.home / "leases.sqlite")


def simulated_fleet(spec: ScenarioSpec) -> SimulatedFleet:
    """The fleet that the scenario describes."""
    return SimulatedFleet(**spec.fleet.model_dump())


def operate_once(catalog: Catalog, spec: ScenarioSpec, inputs: Inputs, now: datetime) -> Round:
    """Settle leases, plan from where the fleet stands, apply the difference, record.

    With the same input as last time and the fleet as planned nothing is solved and nothing moves.
    A running plan gives way only where the new one serves more, or saves at least
    `operate.least_saving_share` after start-ups and drains are paid.
    """
    store, fleet = lease_store(catalog), simulated_fleet(spec)
    held = dict(held_nodes(settle(store, fleet, now)))
    data = allocation_input(inputs, read_library(catalog, inputs), held)
    mark = fingerprint(data)
    with catalog.read() as connection:
        last = reads.read_latest_plan(connection, inputs.scenario.name)
    if last is not None and last.fingerprint == mark and dict(last.nodes) == held:
        return Round(None, Applied(0, 0, 0), "nothing changed", *_cost(data, held))
    running = None
    if last is not None and dict(last.nodes) == held:
        running = keep_running(data, last.replicas, last.nodes)
    homo = plan_homo_joint(data)
    plan, why = _choose(data, homo, running, spec.operate.least_saving_share)
    decision = conclude(catalog, inputs, data, plan, homo)
    wanted = {node_key(n.offer): n.count for n in plan.nodes}
    offers = {node_key(offer): offer for offer in data.offers}
    applied = apply_actions(store, fleet, reconcile(wanted, offers, store.all()), now)
    return Round(decision, applied, why, plan.cost_usd_per_hour, sum(wanted.values()))


operate_task = task(name="operate-once", cache_policy=NO_CACHE)(operate_once)


def _choose(
    data: AllocationInput, homo: Plan, running: Plan | None, least_saving: float
) -> tuple[Plan, str]:
    if running is None:
        return plan_never_worse(data, homo), "a plan for the fleet as it stands"
    start = better_of(running, homo)
    best = plan_never_worse(data, start)
    tolerance = 1e-4 * max(1.0, data.weighted_demand)
    serves_more = running.weighted_shortfall - best.weighted_shortfall > tolerance
    saving = running.objective_usd - best.objective_usd
    if serves_more:
        return best, "the new plan serves more"
    if saving > least_saving * running.objective_usd:
        return best, f"the new plan saves ${saving:.2f} over the horizon"
    return running, "no other plan saves enough to move"


def _cost(data: AllocationInput, held: Mapping[NodeKey, int]) -> tuple[float, int]:
    prices = {node_key(offer): offer.price_usd_per_hour for offer in data.offers}
    return sum(prices[key] * count for key, count in held.items()), sum(held.values())

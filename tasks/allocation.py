"""Allocate with the library in the catalog, compare with Homo-joint, record both."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from prefect import task
from prefect.cache_policies import NO_CACHE

from catalog import reads, writes
from catalog.store import Catalog
from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, node_key
from planner.allocation.solve import plan_allocation
from planner.baselines.homo_joint import better_of, plan_homo_joint
from planner.errors import NoTemplateError
from planner.scenario import Scenario
from planner.types import Template
from tasks.inputs import Inputs
from tasks.library import describe_missing


@dataclass(frozen=True)
class Decision:
    """Coral's plan beside Homo-joint's on the same input."""

    coral: Plan
    homo_joint: Plan
    templates: int
    allocation_id: str


def read_library(catalog: Catalog, inputs: Inputs) -> list[Template]:
    """The scenario's templates.

    Raises NoTemplateError: the library was not built for this scenario, or only in part.
    """
    templates: list[Template] = []
    with catalog.read() as connection:
        for phase in inputs.phases:
            keys = {phase.problem.key(c): c for c in phase.combinations}
            stored = reads.read_solutions(connection, list(keys))
            missing = [c for key, c in keys.items() if key not in stored]
            if missing:
                raise NoTemplateError(
                    f"the library of scenario {inputs.scenario.name!r} is not complete: "
                    f"{describe_missing(phase, missing)}; run `coral library build` first"
                )
            templates += reads.read_templates(connection, list(keys))
    return templates


def decide(catalog: Catalog, inputs: Inputs) -> Decision:
    """Plan with Coral and with Homo-joint; never return a plan worse than Homo-joint's."""
    scenario = inputs.scenario
    data = AllocationInput.of(
        scenario.workloads,
        read_library(catalog, inputs),
        scenario.offers,
        settings=scenario.allocation,
    )
    homo = plan_homo_joint(data)
    coral = plan_allocation(data, start=homo)
    best = better_of(coral, homo)
    if best is homo:  # both are plans of the same program, so Coral's bound holds for it too
        gap = (homo.objective_usd - coral.bound_usd) / homo.objective_usd
        best = replace(homo, bound_usd=coral.bound_usd, gap=max(0.0, gap), solve_s=coral.solve_s)
    allocation_id = uuid.uuid4().hex
    _record(catalog, scenario, allocation_id, len(data.templates), {"coral": best})
    pure = sum(template.is_homogeneous for template in data.templates)
    _record(catalog, scenario, uuid.uuid4().hex, pure, {"homo-joint": homo})
    return Decision(best, homo, len(data.templates), allocation_id)


decide_task = task(name="allocate", cache_policy=NO_CACHE)(decide)


def _record(
    catalog: Catalog, scenario: Scenario, key: str, templates: int, plans: dict[str, Plan]
) -> None:
    now = datetime.now(UTC)
    with catalog.write() as connection:
        for planner, plan in plans.items():
            writes.write_workloads(connection, scenario.name, scenario.workloads, now)
            writes.write_allocation(connection, _row(scenario, key, planner, templates, plan), now)


def _row(
    scenario: Scenario, key: str, planner: str, templates: int, plan: Plan
) -> writes.AllocationRow:
    worth = {node_key(b.offer): b.worth_usd_per_hour for b in plan.binding}
    nodes: Sequence[tuple[object, ...]] = [
        (
            n.offer.domain,
            n.offer.zone,
            n.offer.instance_type,
            n.offer.node_class,
            n.offer.market.value,
            n.count,
            n.offer.price_usd_per_hour,
            n.offer.stock,
            worth.get(node_key(n.offer)),
        )
        for n in plan.nodes
    ]
    return writes.AllocationRow(
        allocation_id=key,
        scenario=scenario.name,
        planner=planner,
        templates=templates,
        cost_usd_per_hour=plan.cost_usd_per_hour,
        objective_usd=plan.objective_usd,
        bound_usd=plan.bound_usd,
        gap=plan.gap,
        proven=plan.proven,
        solve_s=plan.solve_s,
        served_share=plan.served_share,
        stock_note=scenario.stock_note,
        nodes=nodes,
        items=[(r.domain, r.template.id, r.count, r.load_rps) for r in plan.replicas],
        services=[(s.workload, s.demand_rps, s.served_rps) for s in plan.services],
    )

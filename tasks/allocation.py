"""Allocate with the library in the catalog, compare with Homo-joint, record both."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from prefect import task
from prefect.cache_policies import NO_CACHE

from catalog import reads, writes
from catalog.store import Catalog
from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, NodeKey
from planner.baselines.homo_joint import plan_homo_joint, plan_never_worse
from planner.errors import NoTemplateError
from planner.scenario import Scenario
from planner.types import Template
from tasks.inputs import Inputs, PhaseInputs
from tasks.library import describe_missing, may_share


@dataclass(frozen=True)
class Decision:
    """Coral's plan beside Homo-joint's on the same input."""

    coral: Plan
    homo_joint: Plan
    templates: int
    decision_id: str


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
            templates += reads.read_templates(connection, list(keys), _shares(inputs, phase))
    return templates


def allocation_input(
    inputs: Inputs, templates: Sequence[Template], held: Mapping[NodeKey, int] | None = None
) -> AllocationInput:
    """The scenario's allocation with a library and the nodes that already run."""
    scenario = inputs.scenario
    return AllocationInput.of(
        scenario.workloads,
        templates,
        scenario.offers,
        held=held,
        settings=scenario.allocation,
        options=scenario.options,
        rules=scenario.rules,
    )


def decide(catalog: Catalog, inputs: Inputs) -> Decision:
    """Plan with Coral and with Homo-joint; never return a plan worse than Homo-joint's."""
    data = allocation_input(inputs, read_library(catalog, inputs))
    homo = plan_homo_joint(data)
    coral = plan_never_worse(data, homo)
    decision = Decision(coral, homo, len(data.templates), uuid.uuid4().hex)
    record(catalog, inputs.scenario, decision)
    return decision


decide_task = task(name="allocate", cache_policy=NO_CACHE)(decide)


def record(catalog: Catalog, scenario: Scenario, decision: Decision) -> None:
    """Append both plans of a decision in one transaction."""
    plans = [
        _row(scenario, decision.decision_id, "coral", decision.templates, decision.coral),
        _row(scenario, uuid.uuid4().hex, "homo-joint", decision.templates, decision.homo_joint),
    ]
    with catalog.write() as connection:
        writes.write_decision(
            connection,
            decision.decision_id,
            scenario.name,
            scenario.workloads,
            plans,
            datetime.now(UTC),
        )


def _shares(inputs: Inputs, owner: PhaseInputs) -> dict[str, str]:
    """Ids under which the throughput of the owner's templates for others is stored."""
    return {
        guest.problem.key(combination): guest.workload.name
        for guest in inputs.phases
        if may_share(owner, guest)
        for combination in owner.combinations
    }


def _row(
    scenario: Scenario, key: str, planner: str, templates: int, plan: Plan
) -> writes.AllocationRow:
    worth = {
        (b.limit.offer.domain, b.limit.offer.instance_type): b.worth
        if b.worth_unit == "USD/hour"
        else None
        for b in plan.binding
        if b.limit.offer is not None
    }
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
            worth.get((n.offer.domain, n.offer.instance_type)),
        )
        for n in plan.nodes
    ]
    return writes.AllocationRow(
        allocation_id=key,
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
        items=[
            (r.domain, r.template.id, r.count, workload, rps)
            for r in plan.replicas
            for workload, rps in (r.load_rps or {r.template.workload: 0.0}).items()
        ],
        services=[(s.workload, s.demand_rps, s.served_rps) for s in plan.services],
    )

"""Allocate with the library in the catalog, compare with Homo-joint, record both."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from catalog import reads, writes
from catalog.store import Catalog
from planner.allocation.explain import cost_by_workload
from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, NodeKey
from planner.allocation.solve import keep_running
from planner.baselines.homo_joint import plan_homo_joint, plan_never_worse
from planner.caps import with_caps
from planner.corrections import with_corrections
from planner.engine import runnable
from planner.errors import NoTemplateError
from planner.resolve import Scenario
from planner.types import Template
from tasks.coral_task import coral_task
from tasks.inputs import Inputs, PhaseInputs
from tasks.library import all_keys, describe_missing, may_share
from tasks.report import Decision, write_report


def read_library(catalog: Catalog, inputs: Inputs) -> list[Template]:
    """The scenario's templates, under its utilisation caps (calibrated ones where there are).

    Corrected by what serving taught of them.

    Raises NoTemplateError: the library was not built for this scenario, or only in part.
    """
    templates: list[Template] = []
    with catalog.read() as connection:
        for phase in inputs.phases:
            keys = all_keys(phase)
            stored = reads.read_solutions(connection, keys)
            if len(stored) < len(keys):
                raise NoTemplateError(
                    f"the library of scenario {inputs.scenario.name!r} is not complete: "
                    f"{describe_missing(phase, stored['position'].to_list())}; run "
                    "`coral library build` first"
                )
            own = reads.read_templates(connection, keys)
            templates += reads.with_shares(connection, own, _shares(inputs, phase, own))
    capped = with_caps(templates, inputs.caps, inputs.scenario.placement.utilization)
    return with_corrections(capped, inputs.corrections)


def allocation_input(
    inputs: Inputs, templates: Sequence[Template], held: Mapping[NodeKey, int] | None = None
) -> AllocationInput:
    """The scenario's allocation with a library and the nodes that already run.

    Raises NoTemplateError: a workload with demand has no template that the engine can run.
    """
    scenario = inputs.scenario
    usable = runnable(templates, scenario.engine)
    try:
        return AllocationInput.of(
            scenario.workloads,
            usable,
            scenario.offers,
            held=held,
            settings=scenario.allocation,
            options=scenario.options,
            rules=scenario.rules,
        )
    except NoTemplateError as error:
        if len(usable) == len(templates):
            raise
        raise NoTemplateError(
            f"{error}; engine {scenario.engine.value!r} cannot run "
            f"{len(templates) - len(usable)} of the {len(templates)} templates "
            "(`coral library show` says why), `engine: any` plans with all"
        ) from error


def decide(catalog: Catalog, inputs: Inputs) -> Decision:
    """Plan with Coral and with Homo-joint; never return a plan worse than Homo-joint's."""
    data = allocation_input(inputs, read_library(catalog, inputs))
    homo = plan_homo_joint(data)
    coral = plan_never_worse(data, homo)
    return conclude(catalog, inputs, data, coral, homo)


def latest_plan(catalog: Catalog, data: AllocationInput, scenario: str) -> Plan | None:
    """Coral's latest plan of the scenario; None if there is none or the input forbids it now."""
    with catalog.read() as connection:
        stored = reads.read_latest_plan(connection, scenario, applied=False)
    return None if stored is None else keep_running(data, stored.replicas, stored.nodes)


decide_task = coral_task("allocate", decide)


def conclude(
    catalog: Catalog,
    inputs: Inputs,
    data: AllocationInput,
    coral: Plan,
    homo: Plan,
    *,
    mark: str | None = None,
    applied: bool = False,
    at: datetime | None = None,
) -> Decision:
    """Write the report of two plans and record them; `applied` where the fleet follows.

    `mark` is the fingerprint of the market that the fleet stands in, the input's without it; `at`
    the time of the plan (this moment).
    """
    now, key = at or datetime.now(UTC), uuid.uuid4().hex
    folder = catalog.home / "reports"
    decision = Decision(coral, homo, len(data.templates), key, folder / f"{key}.html")
    write_report(decision.report, inputs, decision, data.templates, now)
    record(catalog, inputs.scenario, decision, mark or fingerprint(data), applied, now)
    return decision


def fingerprint(data: AllocationInput) -> str:
    """Content hash of an allocation's input, held nodes apart: equal means nothing changed."""
    rules = [
        (name, rule.domains and sorted(rule.domains), replace(rule, domains=None))
        for name, rule in sorted(data.rules.items())
    ]  # a set prints in another order in every process
    parts = [data.workloads, data.offers, data.settings, data.options, rules]
    parts.append([(template.id, sorted(template.serves.items())) for template in data.templates])
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def record(
    catalog: Catalog,
    scenario: Scenario,
    decision: Decision,
    mark: str,
    applied: bool,
    at: datetime,
) -> None:
    """Append both plans of a decision in one transaction."""
    plans = [
        _row(scenario, key, planner, decision.templates, plan, mark)
        for key, planner, plan in (
            (decision.decision_id, "coral", decision.coral),
            (uuid.uuid4().hex, "homo-joint", decision.homo_joint),
        )
    ]
    with catalog.write() as connection:
        writes.write_decision(
            connection,
            decision.decision_id,
            scenario.name,
            scenario.workloads,
            plans,
            at,
            applied,
        )


def _shares(inputs: Inputs, owner: PhaseInputs, templates: Sequence[Template]) -> dict[str, str]:
    """Ids under which the throughput of the owner's templates for others is stored."""
    return {
        guest.problem.key(template.combination): guest.workload.name
        for guest in inputs.phases
        if may_share(owner, guest)
        for template in templates
    }


def _row(
    scenario: Scenario, key: str, planner: str, templates: int, plan: Plan, mark: str
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
    costs = cost_by_workload(plan)
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
        fingerprint=mark,
        solver=scenario.allocation.solver,
        shortfall_gap=plan.shortfall_gap,
        columns_seen=plan.columns_seen,
        columns_kept=plan.columns_kept,
        phase_seconds=plan.phase_seconds,
        nodes=nodes,
        items=[
            (r.domain, r.template.id, r.count, workload, rps)
            for r in plan.replicas
            for workload, rps in (r.load_rps or {r.template.workload: 0.0}).items()
        ],
        services=[
            (s.workload, s.demand_rps, s.served_rps, costs.get(s.workload, 0.0))
            for s in plan.services
        ],
        binding=[
            (
                b.limit.kind,
                b.limit.text,
                b.used,
                b.limit.amount,
                b.limit.unit,
                b.worth,
                b.worth_unit,
            )
            for b in plan.binding
        ],
        class_worth=[(c.node_class, c.domain, c.worth, c.worth_unit) for c in plan.worth.classes],
    )

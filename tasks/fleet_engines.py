"""From a plan to the engines that a simulation runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from catalog import reads
from planner.allocation.plan import Plan
from planner.types import Template
from simulator.errors import SimulationError
from simulator.fleet import Engine, Site, replica_engines
from tasks.inputs import Inputs


def fleet_of_plan(plan: Plan, decision_id: str = "") -> reads.StoredFleet:
    """A plan as the catalog would give it back."""
    return reads.StoredFleet(
        decision_id,
        plan.cost_usd_per_hour,
        {(r.template.id, r.domain): r.count for r in plan.replicas},
        {(r.template.id, r.domain): dict(r.load_rps) for r in plan.replicas},
        {s.workload: s.demand_rps for s in plan.services},
        {s.workload: s.served_rps for s in plan.services},
    )


def plan_engines(
    fleet: reads.StoredFleet,
    templates: Mapping[str, Template],
    inputs: Inputs,
) -> list[Engine]:
    """Engines of every replica of a plan, weighted by the load that each is to take.

    Raises SimulationError: a template is gone, or its workload is no longer in the scenario.
    """
    kinds = engines_by_replica(fleet, templates, inputs)
    engines = [
        replace(engine, name=f"{key[:8]}-{domain}-{number}/{k}", group=f"{key}-{domain}")
        for (key, domain), count in fleet.replicas.items()
        for number in range(count)
        for k, engine in enumerate(kinds[key, domain])
    ]
    if not engines:
        raise SimulationError("the latest plan has no replicas")
    return engines


def engines_by_replica(
    fleet: reads.StoredFleet, templates: Mapping[str, Template], inputs: Inputs
) -> dict[tuple[str, str], list[Engine]]:
    """Engines of one replica of every (template id, domain). Raises SimulationError as above."""
    nodes = {node.name: node for node in inputs.scenario.node_classes}
    workloads = {workload.name: workload for workload in inputs.scenario.workloads}
    site = Site(inputs.performance, nodes, inputs.scenario.placement)
    found = {}
    for (key, domain), count in fleet.replicas.items():
        if key not in templates:
            raise SimulationError(
                f"the plan's template {key} is not in the database; run `coral allocate` again"
            )
        template = templates[key]
        used = {node.node_class for s in template.placement.stages for node in s.nodes}
        if template.workload not in workloads or not used <= nodes.keys():
            raise SimulationError(
                f"the latest plan has replicas of {template.workload} on "
                f"{', '.join(sorted(used))}, which the scenario no longer has; run "
                "`coral allocate` again"
            )
        found[key, domain] = replica_engines(
            f"{key[:8]}-{domain}",
            template.phase,
            template.placement,
            workloads[template.workload],
            domain,
            {name: rps / count for name, rps in fleet.load_rps[key, domain].items()},
            site,
        )
    return found

"""What a plan is planned to serve against what its replicas serve in simulation.

Part of `python -m bench.simulation`. Every workload's load is raised beyond the point at which the
replicas that the plan gives it would be full by its own formulas (without utilisation caps); the
requests that then end per second are the simulated capacity.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bench.scenarios import built_library
from planner.allocation.plan import Plan
from planner.allocation.solve import plan_allocation
from planner.caps import cap_of
from planner.types import DISAGGREGATED, Phase
from simulator.run import simulate
from simulator.streams import steady_trace
from tasks.fleet_engines import fleet_of_plan, plan_engines
from tasks.home import open_catalog
from tasks.inputs import Inputs, load_inputs
from tasks.scenario_file import read_scenario

BEYOND = 1.15  # times full: everything is saturated, queues stay short enough to measure
MINUTES, FROM_SHARE = 12.0, 0.4  # of arrivals; where the measurement begins


def plan_capacity(scenario: str, home: str | None = None) -> list[dict[str, object]]:
    """A row per workload: requests/s planned when full, simulated, and their ratio."""
    spec = read_scenario(scenario)
    with tempfile.TemporaryDirectory() as folder:
        where = home or folder
        data = built_library(spec, Path(where))
        inputs = load_inputs(open_catalog(where), spec)
    plan = plan_allocation(data)
    return capacity_rows(inputs, plan)


def capacity_rows(inputs: Inputs, plan: Plan) -> list[dict[str, object]]:
    """The rows of one plan."""
    fleet = fleet_of_plan(plan)
    templates = {planned.template.id: planned.template for planned in plan.replicas}
    engines = plan_engines(fleet, templates, inputs)
    full = full_rps(inputs, plan)
    workloads = inputs.scenario.workloads
    trace = steady_trace(workloads, {n: BEYOND * rps for n, rps in full.items()}, MINUTES, 0)
    result = simulate(engines, trace, inputs.performance)
    end = 1e3 * trace.duration_s
    begin = FROM_SHARE * end
    rows: list[dict[str, object]] = []
    for k, workload in enumerate(workloads):
        if workload.name not in full:
            continue
        mine = trace.workload == k
        ended = mine & (result.finish_ms > begin) & (result.finish_ms <= end)
        # By tokens: requests that end in a window are not all of the mean length.
        tokens = trace.input_tokens + trace.output_tokens
        rps = tokens[ended].sum() / tokens[mine].mean() * 1e3 / (end - begin)
        rows.append(
            {
                "workload": workload.name,
                "served_rps": round(fleet.served_rps[workload.name], 3),
                "planned_full_rps": round(full[workload.name], 3),
                "simulated_full_rps": round(float(rps), 3),
                "ratio": round(float(rps) / full[workload.name], 4),
                "phases": _phases(plan, workload.name),
                "shared": _shared(plan, workload.name),
                "preemptions": int(result.preemptions[mine].sum()),
            }
        )
    return rows


def full_rps(inputs: Inputs, plan: Plan) -> dict[str, float]:
    """Requests/s of every workload when all replicas of its plan are full, without caps.

    Each replica's load over how full it is; prefill and decode in a chain.
    """
    caps, assumed = inputs.caps, inputs.scenario.placement.utilization
    full: dict[tuple[str, Phase], float] = {}
    for planned in plan.replicas:
        phase = planned.template.phase
        busy = sum(
            rps
            / planned.template.serves[name]
            * cap_of(caps, name, planned.template, assumed[phase])
            for name, rps in planned.load_rps.items()
        )
        for name, rps in planned.load_rps.items():
            key = (name, phase)
            full[key] = full.get(key, 0.0) + rps * planned.count / max(busy, 1e-9)
    return {
        name: full.get((name, Phase.AGGREGATED), 0.0)
        + min(full.get((name, phase), 0.0) for phase in DISAGGREGATED)
        for name in sorted({name for name, _ in full})
    }


def _phases(plan: Plan, workload: str) -> str:
    rps: Mapping[Phase, float] = {
        phase: sum(
            r.load_rps.get(workload, 0.0) for r in plan.replicas if r.template.phase is phase
        )
        for phase in Phase
    }
    total = rps[Phase.DECODE] + rps[Phase.AGGREGATED]
    return f"{rps[Phase.AGGREGATED] / total:.0%} aggregated" if total else "-"


def _shared(plan: Plan, workload: str) -> float:
    """Share of its load that replicas take which serve others too."""
    mine = [(r.load_rps.get(workload, 0.0), len(r.load_rps) > 1) for r in plan.replicas]
    total = sum(rps for rps, _ in mine)
    return round(float(np.sum([rps for rps, shared in mine if shared]) / total), 3)

"""The latest plan of a scenario under requests, in simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from catalog import reads
from catalog.store import Catalog
from planner.errors import InputError, UnknownNameError
from planner.types import Phase, Template, Workload
from simulator.errors import SimulationError, TraceError
from simulator.fleet import Engine, Site, replica_engines
from simulator.measures import (
    LaneMeasures,
    WorkloadMeasures,
    lane_measures,
    measure,
    usd_per_million_tokens,
)
from simulator.run import Result
from simulator.run import simulate as run_simulation
from simulator.trace import Trace, steady_trace
from tasks.inputs import Inputs
from tasks.trace_file import read_trace_file

WARM_UP_SHARE = 0.1  # of the arrivals' time, not measured: the fleet starts empty
SHAPE_QUANTILE = 0.95  # of a shipped trace's minutes: that one has the plan's demand


class NoFleetError(InputError):
    """Nothing was planned yet for a scenario."""


@dataclass(frozen=True, slots=True)
class PlannedFigures:
    """What the plan promises for a workload."""

    demand_rps: float
    served_rps: float
    output_tokens_per_s: float  # served, at the mean output
    tpot_ms: float | None  # cycle of its decode and aggregated replicas, weighted by load


@dataclass(frozen=True)
class Simulation:
    """Planned and simulated figures of one run."""

    scenario: str
    decision_id: str
    trace: str
    minutes: float
    seed: int
    cost_usd_per_hour: float
    planned: Mapping[str, PlannedFigures]
    simulated: tuple[WorkloadMeasures, ...]
    lanes: tuple[LaneMeasures, ...]
    replicas: int
    engines: int
    result: Result

    @property
    def goodput_tokens_per_s(self) -> float:
        return sum(measured.goodput_tokens_per_s for measured in self.simulated)

    @property
    def usd_per_million_good_tokens(self) -> float:
        return usd_per_million_tokens(self.cost_usd_per_hour, self.goodput_tokens_per_s)


@dataclass(frozen=True, slots=True)
class Load:
    """What requests come."""

    trace: str | None = None  # a file, a shipped trace, or None: Poisson at the plan's demand
    minutes: float = 10.0
    factor: float = 1.0  # times the plan's demand
    seed: int = 0


def simulate_plan(catalog: Catalog, inputs: Inputs, load: Load) -> Simulation:
    """Simulate Coral's latest plan of the scenario.

    Raises NoFleetError: nothing was planned yet. TraceError, SimulationError, UnknownNameError: the
    trace or the plan cannot be simulated.
    """
    scenario = inputs.scenario
    with catalog.read() as connection:
        fleet = reads.read_latest_fleet(connection, scenario.name)
        if fleet is None:
            raise NoFleetError(
                f"nothing was planned yet for scenario {scenario.name!r}; run `coral allocate`"
            )
        keys = sorted({key for key, _ in fleet.replicas})
        templates = {t.id: t for t in reads.read_templates(connection, keys)}
        shapes = reads.read_trace_rps(connection)
    workloads = {workload.name: workload for workload in scenario.workloads}
    engines = plan_engines(fleet, templates, workloads, inputs)
    trace = _trace(scenario.workloads, fleet, load, shapes)
    if not trace.requests:
        raise TraceError("the trace has no requests; give more --minutes or --load")
    result = run_simulation(engines, trace, inputs.performance)
    slos = {name: workload.slo for name, workload in workloads.items()}
    end_s = float(np.nextafter(trace.duration_s, np.inf))
    return Simulation(
        scenario=scenario.name,
        decision_id=fleet.decision_id,
        trace=load.trace or "poisson",
        minutes=trace.duration_s / 60.0,
        seed=load.seed,
        cost_usd_per_hour=fleet.cost_usd_per_hour,
        planned=_planned(fleet, templates, workloads),
        simulated=tuple(measure(result, slos, (WARM_UP_SHARE * trace.duration_s, end_s))),
        lanes=tuple(lane_measures(result)),
        replicas=sum(fleet.replicas.values()),
        engines=len(engines),
        result=result,
    )


simulate_task = task(name="simulate", cache_policy=NO_CACHE)(simulate_plan)


def plan_engines(
    fleet: reads.StoredFleet,
    templates: Mapping[str, Template],
    workloads: Mapping[str, Workload],
    inputs: Inputs,
) -> list[Engine]:
    """Engines of every replica of a plan, weighted by the load that each is to take.

    Raises SimulationError: a template is gone, or its workload is no longer in the scenario.
    """
    nodes = {node.name: node for node in inputs.scenario.node_classes}
    site = Site(inputs.performance, nodes, inputs.scenario.placement)
    engines: list[Engine] = []
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
        weights = {name: rps / count for name, rps in fleet.load_rps[key, domain].items()}
        for number in range(count):
            engines += replica_engines(
                f"{key[:8]}-{domain}-{number}",
                template.phase,
                template.placement,
                workloads[template.workload],
                domain,
                weights,
                site,
            )
    if not engines:
        raise SimulationError("the latest plan has no replicas")
    return engines


def _trace(
    workloads: Sequence[Workload],
    fleet: reads.StoredFleet,
    load: Load,
    shapes: Mapping[str, Sequence[float]],
) -> Trace:
    """The requests asked for; drawn ones at the plan's demand."""
    shape: Sequence[float] = ()
    if load.trace is not None and load.trace in shapes:
        rates = np.array(shapes[load.trace], dtype=float)
        shape = (rates / np.quantile(rates, SHAPE_QUANTILE)).tolist()
    elif load.trace is not None:
        path = Path(load.trace)
        if not path.suffix and not path.exists():
            raise UnknownNameError("trace", load.trace, shapes)
        return read_trace_file(path, workloads)
    rates_rps = {name: rps * load.factor for name, rps in fleet.demand_rps.items()}
    return steady_trace(workloads, rates_rps, load.minutes, load.seed, shape)


def _planned(
    fleet: reads.StoredFleet,
    templates: Mapping[str, Template],
    workloads: Mapping[str, Workload],
) -> dict[str, PlannedFigures]:
    cycles: dict[str, list[tuple[float, float]]] = {name: [] for name in workloads}
    for (key, _), loads in fleet.load_rps.items():
        if templates[key].phase is Phase.PREFILL:
            continue
        for name, rps in loads.items():
            cycles.setdefault(name, []).append((rps, templates[key].placement.cycle_ms))
    found = {}
    for name, workload in workloads.items():
        total = sum(rps for rps, _ in cycles[name])
        served = fleet.served_rps.get(name, 0.0)
        found[name] = PlannedFigures(
            demand_rps=fleet.demand_rps.get(name, 0.0),
            served_rps=served,
            output_tokens_per_s=served * workload.lengths.mean_output,
            tpot_ms=sum(rps * ms for rps, ms in cycles[name]) / total if total else None,
        )
    return found

"""The latest plan of a scenario under requests, in simulation."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb
import numpy as np

from catalog import reads
from catalog.store import Catalog
from planner.errors import InputError
from planner.types import Phase, Slo, Template, Workload
from simulator.errors import TraceError
from simulator.measures import (
    LaneMeasures,
    WorkloadMeasures,
    lane_measures,
    measure,
    usd_per_million_tokens,
)
from simulator.run import Result
from simulator.run import simulate as run_simulation
from tasks.coral_task import coral_task
from tasks.fleet_engines import plan_engines
from tasks.inputs import Inputs
from tasks.requests import History, Load, requests_of
from tasks.simulation_record import record_simulation

WARM_UP_SHARE = 0.1  # of the arrivals' time, not measured: the fleet starts empty


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

    id: str
    scenario: str
    decision_id: str
    load: Load
    minutes: float
    cost_usd_per_hour: float
    planned: Mapping[str, PlannedFigures]
    slos: Mapping[str, Slo]
    simulated: tuple[WorkloadMeasures, ...]
    lanes: tuple[LaneMeasures, ...]
    replicas: int
    engines: int
    result: Result
    report: Path | None = None  # where it was recorded
    events: Path | None = None

    @property
    def goodput_tokens_per_s(self) -> float:
        return sum(measured.goodput_tokens_per_s for measured in self.simulated)

    @property
    def attainment(self) -> float:
        """Share of all requests that met both objectives."""
        total = sum(measured.requests for measured in self.simulated)
        good = sum(measured.attainment * measured.requests for measured in self.simulated)
        return good / total if total else 1.0

    @property
    def usd_per_million_good_tokens(self) -> float:
        return usd_per_million_tokens(self.cost_usd_per_hour, self.goodput_tokens_per_s)


def simulate_plan(
    catalog: Catalog, inputs: Inputs, load: Load, events: Path | None = None
) -> Simulation:
    """Simulate Coral's latest plan of the scenario, and record what came of it.

    `events` is a Parquet file for the requests, one by one.
    Raises NoFleetError: nothing was planned yet. TraceError, SimulationError, UnknownNameError: the
    trace or the plan cannot be simulated. InputError: the file cannot be written.
    """
    name = inputs.scenario.name
    with catalog.read() as connection:
        fleet = reads.read_latest_fleet(connection, name)
        if fleet is None:
            raise NoFleetError(
                f"nothing was planned yet for scenario {name!r}; run `coral allocate`"
            )
        keys = sorted({key for key, _ in fleet.replicas})
        templates = {t.id: t for t in reads.read_templates(connection, keys)}
        histories = read_histories(connection)
    found = simulate_fleet(inputs, templates, fleet, load, histories)
    report = record_simulation(catalog, found, events)
    return replace(found, report=report, events=events)


simulate_task = coral_task("simulate", simulate_plan)


def read_histories(connection: duckdb.DuckDBPyConnection) -> dict[str, History]:
    """Rates of streams by name, for `requests_of`."""
    found = reads.read_demand_histories(connection)
    return {name: (minutes, rates, span) for name, minutes, rates, span in found}


def simulate_fleet(
    inputs: Inputs,
    templates: Mapping[str, Template],
    fleet: reads.StoredFleet,
    load: Load,
    histories: Mapping[str, History],
    demand_rps: Mapping[str, float] | None = None,
) -> Simulation:
    """Serve requests at the fleet's demand, or at another one, with its replicas.

    Raises TraceError, SimulationError, UnknownNameError: the trace or the plan cannot be simulated.
    """
    scenario = inputs.scenario
    workloads = {workload.name: workload for workload in scenario.workloads}
    engines = plan_engines(fleet, templates, inputs)
    demand = fleet.demand_rps if demand_rps is None else demand_rps
    trace = requests_of(load, scenario.workloads, demand, histories)
    if not trace.requests:
        raise TraceError("the trace has no requests; give more --minutes or --load")
    result = run_simulation(engines, trace, inputs.performance)
    slos = {name: workload.slo for name, workload in workloads.items()}
    end_s = float(np.nextafter(trace.duration_s, np.inf))
    return Simulation(
        id=uuid.uuid4().hex,
        scenario=scenario.name,
        decision_id=fleet.decision_id,
        load=load,
        minutes=trace.duration_s / 60.0,
        cost_usd_per_hour=fleet.cost_usd_per_hour,
        planned=_planned(fleet, templates, scenario.workloads),
        slos=slos,
        simulated=tuple(measure(result, slos, (WARM_UP_SHARE * trace.duration_s, end_s))),
        lanes=tuple(lane_measures(result)),
        replicas=sum(fleet.replicas.values()),
        engines=len(engines),
        result=result,
    )


def _planned(
    fleet: reads.StoredFleet,
    templates: Mapping[str, Template],
    workloads: Sequence[Workload],
) -> dict[str, PlannedFigures]:
    cycles: dict[str, list[tuple[float, float]]] = {workload.name: [] for workload in workloads}
    for (key, _), loads in fleet.load_rps.items():
        if templates[key].phase is Phase.PREFILL:
            continue
        for name, rps in loads.items():
            cycles.setdefault(name, []).append((rps, templates[key].placement.cycle_ms))
    found = {}
    for workload in workloads:
        name = workload.name
        total = sum(rps for rps, _ in cycles[name])
        served = fleet.served_rps.get(name, 0.0)
        found[name] = PlannedFigures(
            demand_rps=fleet.demand_rps.get(name, 0.0),
            served_rps=served,
            output_tokens_per_s=served * workload.lengths.mean_output,
            tpot_ms=sum(rps * ms for rps, ms in cycles[name]) / total if total else None,
        )
    return found

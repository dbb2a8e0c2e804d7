"""From catalog rows to planner inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property

import duckdb

from catalog import reads
from catalog.corrections import read_corrections
from catalog.observed import read_observed
from catalog.seed import import_seed
from catalog.simulations import read_caps
from catalog.store import Catalog
from planner.caps import Caps
from planner.hop import hop_of
from planner.known import Known
from planner.market import SNAPSHOT, MarketSpec
from planner.perf.allreduce import AllReduce, LinkFit
from planner.perf.grids import Line
from planner.perf.model import PerformanceModel
from planner.perf.overhead import EnginePoint, fit_engine_overhead, fit_model_overhead
from planner.perf.roofline import Calibration
from planner.perf.tables import LayerRow, group_rows
from planner.placement.combinations import CombinationSet, enumerate_combinations
from planner.placement.profile import PhaseProblem, build_phase_problem
from planner.resolve import Scenario, resolve_scenario
from planner.scenario import ScenarioSpec
from planner.types import Phase, Provenance, Workload
from tasks.market.state import FeedInUse, MarketState, read_state
from tasks.start_ups import with_measured_start_up

CORRECTED = timedelta(hours=24)  # of minutes in which replicas were seen
OBSERVED = timedelta(days=8)  # of demand: forecasts look at the same time on a week's days


@dataclass(frozen=True)
class PhaseInputs:
    """One phase of one workload: what to solve and which combinations."""

    workload: Workload
    problem: PhaseProblem
    max_nodes: int
    memory_ratio: float

    @cached_property
    def combinations(self) -> CombinationSet:
        """Enumerated when first needed: there can be hundreds of thousands."""
        return enumerate_combinations(self.problem, self.max_nodes, self.memory_ratio)


@dataclass(frozen=True)
class Inputs:
    """A resolved scenario with everything that its library depends on."""

    scenario: Scenario
    phases: tuple[PhaseInputs, ...]
    performance: PerformanceModel
    offers_rejected: Mapping[str, int]  # by reason; key '' counts the accepted ones
    prices_at: datetime  # when the oldest of the prices in use were last seen
    feeds: tuple[FeedInUse, ...]  # the sources of prices
    caps: Caps = field(default_factory=dict)  # calibrated utilisation caps; the others are assumed
    corrections: Mapping[str, float] = field(default_factory=dict)  # of throughput, by template
    notes: tuple[str, ...] = ()  # what serving showed to be otherwise than planned

    @property
    def terms(self) -> dict[tuple[str, Phase], str]:
        """What a cap is good for: hashes of the terms by (workload, phase)."""
        return {(p.workload.name, p.problem.phase): p.problem.terms_digest for p in self.phases}


def load_inputs(catalog: Catalog, spec: ScenarioSpec, now: datetime | None = None) -> Inputs:
    """Seed the catalog where it is empty, read what the scenario needs and resolve it.

    `now` is the time by which prices are stale and places are avoided (this moment).
    Raises an InputError that names what is unknown or missing.
    """
    spec = with_measured_start_up(catalog.home, spec)
    with catalog.write() as connection:
        import_seed(connection)
    with catalog.read() as connection:
        market = read_state(connection, spec.market, now or datetime.now(UTC), spec.domains)
        known = read_known(connection, market, now)
        frames = reads.read_performance(connection)
        shipped = spec.market.sources == (SNAPSHOT,)
        judged = reads.read_rejected(connection) if shipped else market.judged
    scenario = resolve_scenario(spec, known)
    performance = performance_model(frames)
    placement = scenario.placement
    phases = tuple(
        PhaseInputs(
            workload,
            build_phase_problem(workload, phase, scenario.node_classes, performance, placement),
            placement.max_nodes,
            placement.memory_ratio,
        )
        for workload in scenario.workloads
        for phase in Phase
    )
    inputs = Inputs(scenario, phases, performance, judged, market.prices_at, market.feeds)
    with catalog.read() as connection:
        if placement.caps == "calibrated":
            caps = read_caps(connection, scenario.name, inputs.terms)
            inputs = replace(inputs, caps=caps)
        if placement.corrections == "observed":
            since = (now or datetime.now(UTC)) - CORRECTED
            rows = read_corrections(connection, scenario.name, since)
            factors = {name: row.factor for name, row in rows.items() if row.factor != 1.0}
            inputs = replace(inputs, corrections=factors)
    return inputs


def read_known(
    connection: duckdb.DuckDBPyConnection,
    market: MarketState | None = None,
    now: datetime | None = None,
) -> Known:
    """What scenarios may name; with the shipped prices where no market is given."""
    state = market or read_state(connection, MarketSpec(), datetime.now(UTC))
    return Known(
        models=reads.read_models(connection),
        instance_types=reads.read_instance_types(connection),
        gpus=reads.read_gpus(connection),
        lengths=reads.read_lengths(connection),
        trace_rps=reads.read_trace_rps(connection),
        histories={
            name: (minutes, rates, span)
            for name, minutes, rates, span in reads.read_demand_histories(connection)
        },
        prices=state.prices,
        stock=reads.read_stock(connection),
        evidence=state.evidence,
        hops={
            name: hop
            for name, messages in reads.read_hops(connection).items()
            if (hop := hop_of(messages)) is not None
        },
        observed=read_observed(connection, (now or datetime.now(UTC)) - OBSERVED),
    )


def performance_model(frames: reads.PerformanceFrames) -> PerformanceModel:
    """The performance model of all tables in the catalog."""
    # Tables measured with experts split by TP; the expert-parallel ones are another placement.
    profile = frames.layer_profile.filter(frames.layer_profile["expert_parallel_size"] <= 1)
    rows = [
        ((model, dtype, gpu, tp), LayerRow(*measured))
        for model, dtype, gpu, tp, _, *measured in profile.iter_rows()
    ]
    calibrations = {
        (gpu, scope, dtype): Calibration(
            compute,
            bandwidth,
            overhead,
            Provenance.CALIBRATED if measured else Provenance.ESTIMATED,
            source,
        )
        for gpu, scope, dtype, compute, bandwidth, overhead, measured, source in (
            frames.calibration.iter_rows()
        )
    }
    points = [
        EnginePoint(f"{capability:.1f}", measured, predicted, model)
        for _, capability, measured, predicted, split, model in frames.engine_point.iter_rows()
        if split == "fit"
    ]
    return PerformanceModel(
        rows=group_rows(rows),
        calibrations=calibrations,
        all_reduce=_all_reduce(frames),
        engine_overhead_ms=fit_engine_overhead(points),
        model_overhead_ms=fit_model_overhead(points),
    )


def _all_reduce(frames: reads.PerformanceFrames) -> AllReduce:
    tables = {
        (gpu, size): Line.of(table["message_bytes"].to_list(), table["all_reduce_ms"].to_list())
        for (gpu, size), table in frames.all_reduce.group_by("gpu_profile", "tensor_parallel_size")
    }
    fits: dict[tuple[str, int], LinkFit] = {}
    for gpu, _, size, latency, bandwidth, source in frames.all_reduce_fit.iter_rows():
        fits.setdefault((gpu, size), LinkFit(latency, bandwidth, source))
    return AllReduce(tables, fits)

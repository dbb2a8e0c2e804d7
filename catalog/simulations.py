"""What simulations said of plans, and the utilisation caps calibrated by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime

import duckdb

from planner.caps import CapKey
from planner.types import Phase


@dataclass(frozen=True, slots=True)
class SimulationRow:
    """One workload of one simulation; the columns of table `simulation`."""

    simulation_id: str
    scenario: str
    decision_id: str
    trace: str
    minutes: float
    load: float
    seed: int
    workload: str
    planned_rps: float
    offered_rps: float
    requests: int
    done: int
    lost: int
    too_long: int
    failed: int
    unfinished: int
    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    goodput_rps: float
    goodput_tokens_per_s: float
    output_tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None
    queue_p95_ms: float | None
    preemptions: int
    cost_usd_per_hour: float
    simulate_s: float


@dataclass(frozen=True, slots=True)
class CapRow:
    """A calibrated utilisation cap; the columns of table `utilization_cap`."""

    scenario: str
    workload: str
    phase: Phase
    template_id: str  # empty: all templates of the phase without a cap of their own
    terms: str  # hash of what the cap was found for: objectives, lengths, engine settings
    cap: float
    assumed: float  # what the scenario says
    attainment: float  # of the workload in the last simulation
    target: float
    simulations: int
    source: str


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One planner between two plans of a replay; the columns of table `evaluation`."""

    evaluation_id: str
    scenario: str
    seed: int
    every_minutes: float
    market_source: str
    planner: str
    hours: float
    usd_per_hour: float
    nodes: int
    lost_nodes: int
    replicas_started: int
    planned_rps: float
    demand_rps: float
    requests: int
    attainment: float
    goodput_tokens_per_s: float
    solve_s: float
    plans: int


def write_simulation(
    connection: duckdb.DuckDBPyConnection, rows: Sequence[SimulationRow], now: datetime
) -> None:
    """Append one simulation."""
    _append(connection, "simulation", "simulated_at", rows, now)


def write_evaluation(
    connection: duckdb.DuckDBPyConnection, rows: Sequence[EvaluationRow], now: datetime
) -> None:
    """Append one replay."""
    _append(connection, "evaluation", "evaluated_at", rows, now)


def write_caps(
    connection: duckdb.DuckDBPyConnection, rows: Sequence[CapRow], now: datetime
) -> None:
    """Append one calibration."""
    _append(connection, "utilization_cap", "calibrated_at", rows, now)


def read_caps(
    connection: duckdb.DuckDBPyConnection, scenario: str, terms: Mapping[tuple[str, Phase], str]
) -> dict[CapKey, float]:
    """The latest caps of those found for the same terms."""
    rows = connection.execute(
        "SELECT workload, phase, template_id, terms, cap FROM utilization_cap "
        "WHERE scenario = ? ORDER BY calibrated_at",
        [scenario],
    ).fetchall()
    return {
        (workload, Phase(phase), template): cap
        for workload, phase, template, found_for, cap in rows
        if terms.get((workload, Phase(phase))) == found_for
    }


def _append(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    stamp: str,
    rows: Sequence[SimulationRow] | Sequence[CapRow] | Sequence[EvaluationRow],
    now: datetime,
) -> None:
    if not rows:
        return
    names = [stamp, *(field.name for field in fields(rows[0]))]
    marks = ", ".join("?" * len(names))
    connection.executemany(
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})",
        [[now, *asdict(row).values()] for row in rows],
    )

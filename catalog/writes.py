"""Writes: appended rows with bound parameters, inside the caller's transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import duckdb

from planner.types import Combination, Phase, Template, Workload


@dataclass(frozen=True, slots=True)
class SolutionRow:
    """The outcome of one combination, and its template where it is worth one."""

    key: str
    workload: str
    phase: Phase
    combination: Combination
    outcome: str
    best_rps: float
    proven: bool
    ilps: int
    seconds: float
    template: Template | None
    asked: Workload  # what the combination was solved for


@dataclass(frozen=True, slots=True)
class BuildRow:
    """One workload's phase in one library build."""

    build_id: str
    scenario: str
    workload: str
    phase: Phase
    combinations: int
    reused: int
    solved: int
    kept: int
    outcomes: Mapping[str, int]
    seconds: float
    solver: str


@dataclass(frozen=True, slots=True)
class AllocationRow:
    """One allocation with its items, as plain values."""

    allocation_id: str
    planner: str
    templates: int
    cost_usd_per_hour: float
    objective_usd: float
    bound_usd: float
    gap: float
    proven: bool
    solve_s: float
    served_share: float
    stock_note: str
    fingerprint: str  # of the input, held nodes apart
    nodes: Sequence[tuple[object, ...]]  # domain .. worth_usd_per_hour of allocation_nodes
    items: Sequence[tuple[object, ...]]  # domain .. load_rps of allocation_item
    services: Sequence[tuple[object, ...]]  # workload .. served_rps of allocation_service
    binding: Sequence[tuple[object, ...]]  # kind .. worth_unit of allocation_binding


def write_solutions(
    connection: duckdb.DuckDBPyConnection, rows: Sequence[SolutionRow], now: datetime
) -> None:
    """Store solved combinations; one that is there already stays as it was, with its stages."""
    known = {
        key
        for (key,) in connection.execute(
            "SELECT solution_id FROM solution WHERE solution_id IN (SELECT unnest(?::TEXT[]))",
            [[row.key for row in rows]],
        ).fetchall()
    }
    rows = [row for row in rows if row.key not in known]
    _insert(
        connection,
        "INSERT INTO solution (solution_id, built_at, workload, phase, combination, "
        "outcome, best_rps, proven, ilps, seconds) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (r.key, now, r.workload, r.phase.value, json.dumps(r.combination), r.outcome,
             r.best_rps, r.proven, r.ilps, r.seconds)
            for r in rows
        ],
    )  # fmt: skip
    made = [(r.template, r.asked) for r in rows if r.template is not None]
    templates = [template for template, _ in made]
    _insert(
        connection,
        "INSERT INTO template (template_id, built_at, workload, phase, model, ttft_ms, "
        "tpot_ms, mean_input, mean_output, combination, nodes, throughput_rps, raw_rps, cycle_ms, "
        "latency_ms, micro_batches, micro_batch_size, placement, provenance) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (t.id, now, t.workload, t.phase.value, w.model.name, w.slo.ttft_ms, w.slo.tpot_ms,
             w.lengths.mean_input, w.lengths.mean_output, json.dumps(t.combination), t.nodes,
             t.throughput_rps, t.placement.raw_rps, t.placement.cycle_ms, t.placement.latency_ms,
             t.placement.micro_batches, t.placement.micro_batch_size, t.placement.describe(),
             t.provenance.value)
            for t, w in made
        ],
    )  # fmt: skip
    _insert(
        connection,
        "INSERT INTO template_stage (template_id, stage, position, first_layer, layers, "
        "node_class, tensor_parallel_size, data_parallel_size, batch) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (t.id, index, position, stage.first_layer, stage.layers, node.node_class,
             node.tensor_parallel_size, node.data_parallel_size, node.batch)
            for t in templates
            for index, stage in enumerate(t.placement.stages)
            for position, node in enumerate(stage.nodes)
        ],
    )  # fmt: skip


def write_build(connection: duckdb.DuckDBPyConnection, row: BuildRow, now: datetime) -> None:
    """Record one workload's phase of a library build."""
    connection.execute(
        "INSERT INTO library_build (build_id, finished_at, scenario, workload, phase, "
        "combinations, reused, solved, kept, outcomes, seconds, solver) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [row.build_id, now, row.scenario, row.workload, row.phase.value, row.combinations,
         row.reused, row.solved, row.kept, json.dumps(dict(row.outcomes)), row.seconds,
         row.solver],
    )  # fmt: skip


def write_shares(
    connection: duckdb.DuckDBPyConnection, rows: Sequence[tuple[str, str, str, float]]
) -> None:
    """Throughput of templates for other workloads: (template, share id, workload, requests/s)."""
    _insert(
        connection,
        "INSERT OR IGNORE INTO template_share (template_id, share_id, workload, throughput_rps) "
        "VALUES (?, ?, ?, ?)",
        rows,
    )


def write_decision(
    connection: duckdb.DuckDBPyConnection,
    decision_id: str,
    scenario: str,
    workloads: Sequence[Workload],
    plans: Sequence[AllocationRow],
    now: datetime,
    applied: bool,
) -> None:
    """Append one decision: what was asked for and every plan made for it.

    `applied` says that the fleet follows the first of the plans.
    """
    _insert(
        connection,
        "INSERT INTO workload (decision_id, observed_at, scenario, workload, model, dtype, "
        "ttft_ms, tpot_ms, mean_input, mean_output, p95_input, p95_output, demand_rps) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (decision_id, now, scenario, w.name, w.model.name, w.dtype, w.slo.ttft_ms,
             w.slo.tpot_ms, w.lengths.mean_input, w.lengths.mean_output, w.lengths.p95_input,
             w.lengths.p95_output, w.demand_rps)
            for w in workloads
        ],
    )  # fmt: skip
    for index, row in enumerate(plans):
        _write_allocation(connection, decision_id, scenario, row, now, applied and index == 0)


def _write_allocation(
    connection: duckdb.DuckDBPyConnection,
    decision_id: str,
    scenario: str,
    row: AllocationRow,
    now: datetime,
    applied: bool,
) -> None:
    connection.execute(
        "INSERT INTO allocation (allocation_id, decision_id, created_at, scenario, planner, "
        "templates, cost_usd_per_hour, objective_usd, bound_usd, gap, proven, solve_s, "
        "served_share, stock_note, fingerprint, applied) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [row.allocation_id, decision_id, now, scenario, row.planner, row.templates,
         row.cost_usd_per_hour, row.objective_usd, row.bound_usd, row.gap, row.proven,
         row.solve_s, row.served_share, row.stock_note, row.fingerprint,
         applied],
    )  # fmt: skip
    for table, values in (
        ("allocation_nodes", row.nodes),
        ("allocation_item", row.items),
        ("allocation_service", row.services),
        ("allocation_binding", row.binding),
    ):
        if values:
            marks = ", ".join("?" * (len(values[0]) + 1))
            _insert(
                connection,
                f"INSERT INTO {table} VALUES ({marks})",
                [(row.allocation_id, *value) for value in values],
            )


def _insert(
    connection: duckdb.DuckDBPyConnection, statement: str, rows: Sequence[tuple[object, ...]]
) -> None:
    if rows:
        connection.executemany(statement, rows)

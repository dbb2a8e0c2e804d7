"""Writes: appended rows with bound parameters, inside the caller's transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

import duckdb
import polars as pl

from planner.types import GpuSpec, ModelSpec, Phase, Template, Workload


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
    searched: int
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
    solver: str
    shortfall_gap: float
    columns_seen: int
    columns_kept: int
    phase_seconds: Mapping[str, float]
    nodes: Sequence[tuple[object, ...]]  # domain .. worth_usd_per_hour of allocation_nodes
    items: Sequence[tuple[object, ...]]  # domain .. load_rps of allocation_item
    services: Sequence[tuple[object, ...]]  # workload .. cost_usd_per_hour of allocation_service
    binding: Sequence[tuple[object, ...]]  # kind .. worth_unit of allocation_binding
    class_worth: Sequence[tuple[object, ...]]  # node_class .. of allocation_class_worth


def write_solutions(
    connection: duckdb.DuckDBPyConnection,
    asked: Workload,
    phase: Phase,
    solved: pl.DataFrame,
    templates: Sequence[Template],
    now: datetime,
) -> None:
    """Store solved combinations; one that is there already stays as it was, with its stages.

    `solved` has solution_id, combination (JSON), outcome, best_rps, proven, searches, seconds.
    """
    connection.register("solved", solved)
    new = connection.sql(
        "SELECT solution_id FROM solved WHERE solution_id NOT IN (SELECT solution_id FROM solution)"
    ).pl()
    connection.register("new", new)
    connection.execute(
        "INSERT INTO solution (solution_id, built_at, workload, phase, combination, outcome, "
        "best_rps, proven, searches, seconds) "
        "SELECT solution_id, ?, ?, ?, combination, outcome, best_rps, proven, searches, seconds "
        "FROM solved WHERE solution_id IN (SELECT solution_id FROM new)",
        [now, asked.name, phase.value],
    )
    connection.unregister("new")
    connection.unregister("solved")
    fresh = set(new["solution_id"].to_list())
    made = [template for template in templates if template.id in fresh]
    if not made:
        return
    _insert_frame(
        connection,
        "template",
        [
            {
                "template_id": t.id, "built_at": now, "workload": t.workload,
                "phase": t.phase.value, "model": asked.model.name, "ttft_ms": asked.slo.ttft_ms,
                "tpot_ms": asked.slo.tpot_ms, "mean_input": asked.lengths.mean_input,
                "mean_output": asked.lengths.mean_output,
                "combination": json.dumps(t.combination), "nodes": t.nodes,
                "throughput_rps": t.throughput_rps, "raw_rps": t.placement.raw_rps,
                "cycle_ms": t.placement.cycle_ms, "latency_ms": t.placement.latency_ms,
                "micro_batches": t.placement.micro_batches,
                "micro_batch_size": t.placement.micro_batch_size,
                "placement": t.placement.describe(), "provenance": t.provenance.value,
            }
            for t in made
        ],
    )  # fmt: skip
    _insert_frame(
        connection,
        "template_stage",
        [
            {
                "template_id": t.id, "stage": index, "position": position,
                "first_layer": stage.first_layer, "layers": stage.layers,
                "node_class": node.node_class,
                "tensor_parallel_size": node.tensor_parallel_size,
                "data_parallel_size": node.data_parallel_size, "batch": node.batch,
            }
            for t in made
            for index, stage in enumerate(t.placement.stages)
            for position, node in enumerate(stage.nodes)
        ],
    )  # fmt: skip


def write_build(connection: duckdb.DuckDBPyConnection, row: BuildRow, now: datetime) -> None:
    """Record one workload's phase of a library build."""
    connection.execute(
        "INSERT INTO library_build (build_id, finished_at, scenario, workload, phase, "
        "combinations, reused, solved, searched, kept, outcomes, seconds, solver) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [row.build_id, now, row.scenario, row.workload, row.phase.value, row.combinations,
         row.reused, row.solved, row.searched, row.kept, json.dumps(dict(row.outcomes)),
         row.seconds, row.solver],
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


@dataclass(frozen=True, slots=True)
class ProfileRows:
    """A profile as plain values, for `write_measured`."""

    gpu: GpuSpec
    model: ModelSpec
    # by size: (phase, batch, tokens, context, linear_ms, attention_ms, communication_ms, head_ms,
    # source)
    layers: Mapping[int, Sequence[Sequence[object]]]
    all_reduce: Sequence[tuple[int, int, float]]  # size, message bytes, ms
    hop: Sequence[tuple[int, float]]  # message bytes, ms
    # (size, input, output, concurrency, measured TTFT, measured and predicted TPOT, layers,
    # measured and predicted requests/s)
    engine: Sequence[Sequence[object]]
    lifted: Mapping[int, int]
    outliers: Mapping[int, int]
    source: str
    provenance: Mapping[str, object]


def write_measured(
    connection: duckdb.DuckDBPyConnection,
    profile: ProfileRows,
    now: datetime,
    replace: bool = False,
) -> None:
    """Take in a profile in place of earlier tables of the same model, dtype, GPU and size.

    A GPU or model that is there stays as it is, unless it is to be replaced too.
    """
    gpu, model = profile.gpu, profile.model
    if replace:
        connection.execute("DELETE FROM gpu WHERE gpu = ?", [gpu.name])
        connection.execute("DELETE FROM model WHERE model = ?", [model.name])
    connection.execute(
        "INSERT INTO gpu SELECT ?, ?, ?, ?, ?, ?, ?, ? "
        "WHERE NOT EXISTS (SELECT 1 FROM gpu WHERE gpu = ?)",
        [*_gpu_row(gpu, profile.source), gpu.name],
    )
    known = connection.execute("SELECT 1 FROM model WHERE model = ?", [model.name]).fetchall()
    if not known:
        _insert_model(connection, model, profile.source)
    for size, rows in profile.layers.items():
        key = [model.name, model.dtype, gpu.profile_name, size]
        where = "WHERE model = ? AND dtype = ? AND gpu_profile = ? AND tensor_parallel_size = ?"
        connection.execute(f"DELETE FROM layer_profile {where}", key)
        connection.execute(f"DELETE FROM profile {where}", key)
        _insert(
            connection,
            "INSERT INTO layer_profile (model, dtype, gpu_profile, tensor_parallel_size, "
            "expert_parallel_size, phase, batch, tokens, context, linear_ms, attention_ms, "
            "communication_ms, head_ms, source) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(*key, int(model.is_moe), *row) for row in rows],
        )
        connection.execute(
            "INSERT INTO profile VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [*key, now, len(rows), profile.lifted[size], profile.outliers[size], profile.source,
             json.dumps(dict(profile.provenance))],
        )  # fmt: skip
    for size in {size for size, _, _ in profile.all_reduce}:
        connection.execute(
            "DELETE FROM all_reduce WHERE gpu_profile = ? AND tensor_parallel_size = ?",
            [gpu.profile_name, size],
        )
    _insert(
        connection,
        "INSERT INTO all_reduce (gpu_profile, tensor_parallel_size, message_bytes, all_reduce_ms, "
        "source) VALUES (?, ?, ?, ?, ?)",
        [(gpu.profile_name, *row, profile.source) for row in profile.all_reduce],
    )
    if profile.hop:
        connection.execute("DELETE FROM hop WHERE gpu_profile = ?", [gpu.profile_name])
    _insert(
        connection,
        "INSERT INTO hop (gpu_profile, message_bytes, hop_ms, source) VALUES (?, ?, ?, ?)",
        [(gpu.profile_name, *row, profile.source) for row in profile.hop],
    )
    for engine_size in {row[0] for row in profile.engine}:
        connection.execute(
            "DELETE FROM engine_point WHERE model = ? AND gpu_profile = ? "
            "AND tensor_parallel_size = ?",
            [model.name, gpu.profile_name, engine_size],
        )
    _insert(
        connection,
        "INSERT INTO engine_point (model, gpu_profile, split, tensor_parallel_size, input_tokens, "
        "output_tokens, concurrency, measured_ttft_ms, measured_tpot_ms, predicted_tpot_ms, "
        "layers, measured_throughput_rps, predicted_throughput_rps, source) "
        "VALUES (?, ?, 'fit', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [(model.name, gpu.profile_name, *row, profile.source) for row in profile.engine],
    )


def _gpu_row(gpu: GpuSpec, source: str) -> list[object]:
    """Of table gpu, in the order of its columns."""
    return [
        gpu.name, gpu.profile_name, gpu.memory_gib, gpu.memory_bandwidth_gbyte_per_s,
        gpu.half_tflops, gpu.power_w, gpu.compute_capability, source,
    ]  # fmt: skip


def _insert_model(connection: duckdb.DuckDBPyConnection, model: ModelSpec, source: str) -> None:
    shapes = {**asdict(model), "model": model.name, "note": source}
    del shapes["name"]
    _insert_frame(connection, "model", [shapes])


def write_calibration(
    connection: duckdb.DuckDBPyConnection, gpu_profile: str, scope: str, dtype: str,
    factors: tuple[float, float, float], source: str,
) -> None:  # fmt: skip
    """Roofline factors (compute and bandwidth efficiency, overhead in us) in place of earlier."""
    key = [gpu_profile, scope, dtype]
    connection.execute(
        "DELETE FROM calibration WHERE gpu_profile = ? AND scope = ? AND dtype = ?", key
    )
    connection.execute(
        "INSERT INTO calibration (gpu_profile, scope, dtype, compute_efficiency, "
        "bandwidth_efficiency, fixed_overhead_us, measured, source) "
        "VALUES (?, ?, ?, ?, ?, ?, true, ?)",
        [*key, *factors, source],
    )


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
        "served_share, stock_note, fingerprint, applied, solver, shortfall_gap, columns_seen, "
        "columns_kept, phase_seconds) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [row.allocation_id, decision_id, now, scenario, row.planner, row.templates,
         row.cost_usd_per_hour, row.objective_usd, row.bound_usd, row.gap, row.proven,
         row.solve_s, row.served_share, row.stock_note, row.fingerprint,
         applied, row.solver, row.shortfall_gap, row.columns_seen, row.columns_kept,
         json.dumps({phase: round(spent, 3) for phase, spent in row.phase_seconds.items()})],
    )  # fmt: skip
    for table, values in (
        ("allocation_nodes", row.nodes),
        ("allocation_item", row.items),
        ("allocation_service", row.services),
        ("allocation_binding", row.binding),
        ("allocation_class_worth", row.class_worth),
    ):
        if values:
            marks = ", ".join("?" * (len(values[0]) + 1))
            _insert(
                connection,
                f"INSERT INTO {table} VALUES ({marks})",
                [(row.allocation_id, *value) for value in values],
            )


def _insert_frame(
    connection: duckdb.DuckDBPyConnection, table: str, rows: Sequence[Mapping[str, object]]
) -> None:
    """Many rows at once, columns by name."""
    frame = pl.DataFrame(rows, infer_schema_length=None)
    columns = ", ".join(frame.columns)
    connection.register("rows", frame)
    connection.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM rows")
    connection.unregister("rows")


def _insert(
    connection: duckdb.DuckDBPyConnection, statement: str, rows: Sequence[tuple[object, ...]]
) -> None:
    if rows:
        connection.executemany(statement, rows)

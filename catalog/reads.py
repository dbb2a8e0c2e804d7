"""Reads: rows become domain types at the edge; performance tables come as frames."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import duckdb
import polars as pl

from planner.types import (
    GpuSpec,
    InstanceType,
    Lengths,
    Link,
    Market,
    ModelSpec,
    NodeClass,
    Phase,
    Placement,
    Provenance,
    Stage,
    StageNode,
    Template,
    combination_of,
)

# Stages of templates by key, in the order of their nodes.
STAGES = (
    "SELECT template_id, stage, first_layer, layers, node_class, tensor_parallel_size, "
    "data_parallel_size, batch FROM template_stage "
    "WHERE template_id IN (SELECT unnest($1::TEXT[])) ORDER BY template_id, stage, position"
)


@dataclass(frozen=True)
class PerformanceFrames:
    """Everything that the performance model is built from."""

    layer_profile: pl.DataFrame
    calibration: pl.DataFrame
    all_reduce: pl.DataFrame
    all_reduce_fit: pl.DataFrame
    engine_point: pl.DataFrame


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """Coral's latest plan for a scenario, as counts."""

    decision_id: str
    fingerprint: str
    replicas: Mapping[tuple[str, str], int]  # (template id, domain)
    nodes: Mapping[tuple[str, str, Market], int]  # (domain, instance type, market)
    load_rps: Mapping[tuple[str, str], float]  # of all replicas of a (template id, domain)


@dataclass(frozen=True, slots=True)
class StoredFleet:
    """Coral's latest plan of a scenario, with the load of every workload on its replicas."""

    decision_id: str
    cost_usd_per_hour: float
    replicas: Mapping[tuple[str, str], int]  # (template id, domain)
    load_rps: Mapping[tuple[str, str], Mapping[str, float]]  # by workload, of all those replicas
    demand_rps: Mapping[str, float]
    served_rps: Mapping[str, float]


def read_gpus(connection: duckdb.DuckDBPyConnection) -> dict[str, GpuSpec]:
    """GPU types by market name."""
    rows = connection.execute(
        "SELECT gpu, profile_name, memory_gib, memory_bandwidth_gbyte_per_s, half_tflops, "
        "power_w, compute_capability FROM gpu"
    ).fetchall()
    return {row[0]: GpuSpec(*row) for row in rows}


def read_models(connection: duckdb.DuckDBPyConnection) -> dict[str, ModelSpec]:
    """Models by name."""
    rows = connection.execute(
        "SELECT model, dtype, layers, hidden, heads, kv_heads, head_dim, intermediate, experts, "
        "experts_per_token, moe_intermediate, vocab, weight_bytes, expert_weight_bytes, "
        "bytes_per_layer, embed_bytes, lm_head_bytes, kv_bytes_per_token_per_layer, "
        "hop_bytes_per_token FROM model"
    ).fetchall()
    return {row[0]: ModelSpec(*row) for row in rows}


def read_instance_types(connection: duckdb.DuckDBPyConnection) -> list[InstanceType]:
    """Instance types that map to node classes, each with the nodes that it gives."""
    gpus = read_gpus(connection)
    rows = connection.execute(
        "SELECT cloud, instance_type, vcpus, node_class, gpu, gpu_count, link, "
        "network_peak_gbit_per_s, network_baseline_gbit_per_s FROM instance_type ORDER BY ALL"
    ).fetchall()
    return [
        InstanceType(cloud, name, vcpus, NodeClass(node, gpus[gpu], count, Link(link), *network))
        for cloud, name, vcpus, node, gpu, count, link, *network in rows
    ]


def read_lengths(connection: duckdb.DuckDBPyConnection) -> dict[str, Lengths]:
    """Length distributions by name."""
    rows = connection.execute(
        "SELECT name, mean_input, mean_output, p95_input, p95_output FROM length_distribution"
    ).fetchall()
    return {row[0]: Lengths(*row) for row in rows}


def read_trace_rps(connection: duckdb.DuckDBPyConnection) -> dict[str, list[float]]:
    """Requests/s of every minute of every trace."""
    rows = connection.execute(
        "SELECT trace, list(requests / 60.0 ORDER BY minute) FROM demand GROUP BY trace"
    ).fetchall()
    return {trace: list(values) for trace, values in rows}


def read_demand_histories(
    connection: duckdb.DuckDBPyConnection,
) -> list[tuple[str, float, list[float], float]]:
    """Series, minutes of its windows, their rates (requests/s, oldest first), minutes they span."""
    return connection.execute(
        "SELECT series, any_value(window_minutes), list(requests_per_s ORDER BY window_start), "
        "date_diff('second', min(window_start), max(window_start)) / 60.0 "
        "+ any_value(window_minutes) FROM demand_history GROUP BY series ORDER BY series"
    ).fetchall()


def read_stock(connection: duckdb.DuckDBPyConnection) -> dict[tuple[str, str, str], int]:
    """Nodes by (level, domain, instance type); assumed, see the table's source column."""
    rows = connection.execute(
        "SELECT level, domain, instance_type, nodes FROM availability "
        "WHERE observed_at = (SELECT max(observed_at) FROM availability)"
    ).fetchall()
    return {(level, domain, name): nodes for level, domain, name, nodes in rows}


def read_hops(connection: duckdb.DuckDBPyConnection) -> dict[str, list[tuple[float, float]]]:
    """Measured messages between stages, (bytes, ms), by profile of the GPU."""
    rows = connection.execute("SELECT gpu_profile, message_bytes, hop_ms FROM hop").fetchall()
    found: dict[str, list[tuple[float, float]]] = {}
    for name, size, ms in rows:
        found.setdefault(name, []).append((size, ms))
    return found


def read_rejected(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """Rejected prices of the shipped snapshot by reason; key '' counts the accepted ones."""
    rows = connection.execute(
        "SELECT coalesce(rejected_because, ''), count(*) FROM offer WHERE feed = 'snapshot' "
        "AND observed_at = (SELECT max(observed_at) FROM offer WHERE feed = 'snapshot') "
        "GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    return dict(rows)


def read_performance(connection: duckdb.DuckDBPyConnection) -> PerformanceFrames:
    """All performance tables."""
    return PerformanceFrames(
        layer_profile=connection.sql(
            "SELECT model, dtype, gpu_profile, tensor_parallel_size, expert_parallel_size, phase, "
            "batch, tokens, context, linear_ms, attention_ms, head_ms, source FROM layer_profile "
            "ORDER BY ALL"
        ).pl(),
        calibration=connection.sql(
            "SELECT gpu_profile, scope, dtype, compute_efficiency, bandwidth_efficiency, "
            "fixed_overhead_us, measured, source FROM calibration ORDER BY ALL"
        ).pl(),
        all_reduce=connection.sql(
            "SELECT gpu_profile, tensor_parallel_size, message_bytes, all_reduce_ms "
            "FROM all_reduce ORDER BY ALL"
        ).pl(),
        all_reduce_fit=connection.sql(
            "SELECT gpu_profile, interconnect, tensor_parallel_size, latency_us, "
            "bus_bandwidth_gbyte_per_s, source FROM all_reduce_fit ORDER BY ALL"
        ).pl(),
        engine_point=connection.sql(
            "SELECT p.gpu_profile, g.compute_capability, p.measured_tpot_ms, p.predicted_tpot_ms, "
            "p.split, p.model FROM engine_point p "
            "JOIN gpu g ON g.profile_name = p.gpu_profile ORDER BY ALL"
        ).pl(),
    )


def read_solutions(connection: duckdb.DuckDBPyConnection, keys: Sequence[str]) -> pl.DataFrame:
    """Earlier results: position (in `keys`), outcome, best_rps, proven; none where never solved."""
    wanted = pl.DataFrame(
        {"position": range(len(keys)), "solution_id": keys},
        schema={"position": pl.Int64, "solution_id": pl.String},
    )
    connection.register("wanted", wanted)
    found: pl.DataFrame = connection.sql(
        "SELECT position, outcome, best_rps, proven FROM wanted JOIN solution USING (solution_id) "
        "ORDER BY position"
    ).pl()
    connection.unregister("wanted")
    return found


def any_solutions(connection: duckdb.DuckDBPyConnection) -> bool:
    """Whether anything was solved earlier."""
    return bool(connection.execute("SELECT 1 FROM solution LIMIT 1").fetchall())


def count_solutions(connection: duckdb.DuckDBPyConnection, keys: Sequence[str]) -> int:
    """How many of some keys were solved earlier."""
    connection.register("wanted", pl.DataFrame({"solution_id": keys}, {"solution_id": pl.String}))
    found = connection.execute("SELECT count(*) FROM wanted JOIN solution USING (solution_id)")
    count = int(found.fetchall()[0][0])
    connection.unregister("wanted")
    return count


def read_templates(
    connection: duckdb.DuckDBPyConnection,
    keys: Sequence[str],
) -> list[Template]:
    """Templates by key, with their stages; keys without a template are passed over."""
    stages = _read_stages(connection, keys)
    rows = connection.execute(
        "SELECT template_id, workload, phase, combination, throughput_rps, raw_rps, cycle_ms, "
        "latency_ms, micro_batches, micro_batch_size, provenance FROM template "
        "WHERE template_id IN (SELECT unnest(?::TEXT[])) ORDER BY template_id",
        [list(keys)],
    ).fetchall()
    return [
        Template(
            id=key,
            workload=workload,
            phase=Phase(phase),
            combination=combination_of(dict(json.loads(combination))),
            placement=Placement(stages[key], micro_batches, batch, cycle, latency, raw),
            throughput_rps=throughput,
            provenance=Provenance(provenance),
        )
        for (
            key, workload, phase, combination, throughput, raw, cycle, latency,
            micro_batches, batch, provenance,
        ) in rows
    ]  # fmt: skip


def _read_stages(
    connection: duckdb.DuckDBPyConnection, keys: Sequence[str]
) -> Mapping[str, tuple[Stage, ...]]:
    return stages_of(connection.execute(STAGES, [list(keys)]).fetchall())


def stages_of(rows: Iterable[Sequence[Any]]) -> Mapping[str, tuple[Stage, ...]]:
    """Stages by template, of what STAGES asks for."""
    grouped: dict[str, dict[tuple[int, int, int], list[StageNode]]] = {}
    for key, stage, first, layers, *node in rows:
        grouped.setdefault(key, {}).setdefault((stage, first, layers), []).append(StageNode(*node))
    return {
        key: tuple(
            Stage(first, layers, tuple(nodes)) for (_, first, layers), nodes in stages.items()
        )
        for key, stages in grouped.items()
    }


def with_shares(
    connection: duckdb.DuckDBPyConnection,
    templates: Sequence[Template],
    shares: Mapping[str, str],
) -> list[Template]:
    """Templates with their throughput for other workloads.

    `shares` maps the ids under which it is stored to the workloads.
    """
    found: dict[str, dict[str, float]] = {}
    keys = [template.id for template in templates] if shares else []
    for key, share, rps in read_shares(connection, keys, list(shares)):
        found.setdefault(key, {})[shares[share]] = rps
    return [
        replace(template, shared_rps=found[template.id]) if template.id in found else template
        for template in templates
    ]


def read_shares(
    connection: duckdb.DuckDBPyConnection, keys: Sequence[str], share_ids: Sequence[str]
) -> list[tuple[str, str, float]]:
    """Known throughput for other workloads: (template, share id, requests/s), zeros included."""
    return connection.execute(
        "SELECT template_id, share_id, throughput_rps FROM template_share "
        "WHERE template_id IN (SELECT unnest(?::TEXT[])) "
        "AND share_id IN (SELECT unnest(?::TEXT[])) ORDER BY ALL",
        [list(keys), list(share_ids)],
    ).fetchall()


def read_latest_plan(
    connection: duckdb.DuckDBPyConnection, scenario: str, *, applied: bool = True
) -> StoredPlan | None:
    """Coral's latest plan of a scenario, or the one its fleet was last brought to; None if none."""
    rows = connection.execute(
        "SELECT allocation_id, decision_id, fingerprint FROM allocation WHERE scenario = ? "
        "AND planner = 'coral' AND (applied OR NOT ?) ORDER BY rowid DESC LIMIT 1",
        [scenario, applied],
    ).fetchall()
    if not rows:
        return None
    key, decision_id, fingerprint = rows[0]
    items = connection.execute(
        "SELECT template_id, domain, any_value(replicas), sum(load_rps) FROM allocation_item "
        "WHERE allocation_id = ? GROUP BY template_id, domain ORDER BY ALL",
        [key],
    ).fetchall()
    nodes = connection.execute(
        "SELECT domain, instance_type, market, nodes FROM allocation_nodes WHERE allocation_id = ?",
        [key],
    ).fetchall()
    return StoredPlan(
        decision_id,
        fingerprint,
        {(template, domain): count for template, domain, count, _ in items},
        {(domain, name, Market(market)): count for domain, name, market, count in nodes},
        {(template, domain): rps for template, domain, _, rps in items},
    )


def read_decisions_in_force(connection: duckdb.DuckDBPyConnection) -> set[str]:
    """Of every scenario the latest decision, and the one its fleet was last brought to."""
    rows = connection.execute(
        "SELECT arg_max(decision_id, rowid), arg_max(decision_id, rowid) FILTER (applied) "
        "FROM allocation WHERE planner = 'coral' GROUP BY scenario"
    ).fetchall()
    return {key for row in rows for key in row if key is not None}


def read_latest_fleet(connection: duckdb.DuckDBPyConnection, scenario: str) -> StoredFleet | None:
    """Coral's latest plan of a scenario as a fleet to simulate; None if there is none."""
    rows = connection.execute(
        "SELECT allocation_id, decision_id, cost_usd_per_hour FROM allocation WHERE scenario = ? "
        "AND planner = 'coral' ORDER BY rowid DESC LIMIT 1",
        [scenario],
    ).fetchall()
    if not rows:
        return None
    key, decision_id, cost = rows[0]
    items = connection.execute(
        "SELECT template_id, domain, workload, replicas, load_rps FROM allocation_item "
        "WHERE allocation_id = ? ORDER BY ALL",
        [key],
    ).fetchall()
    services = connection.execute(
        "SELECT workload, demand_rps, served_rps FROM allocation_service WHERE allocation_id = ?",
        [key],
    ).fetchall()
    loads: dict[tuple[str, str], dict[str, float]] = {}
    for template, domain, workload, _, rps in items:
        loads.setdefault((template, domain), {})[workload] = rps
    return StoredFleet(
        decision_id,
        cost,
        {(template, domain): count for template, domain, _, count, _ in items},
        loads,
        {workload: demand for workload, demand, _ in services},
        {workload: served for workload, _, served in services},
    )


def read_table_list(
    connection: duckdb.DuckDBPyConnection,
) -> tuple[list[str], list[tuple[object, ...]]]:
    """Every layer table, one's own first."""
    found = connection.execute(
        "SELECT l.model, l.dtype, l.gpu_profile AS gpu, l.tensor_parallel_size AS tp, "
        "count(*) AS rows, any_value(p.lifted) AS lifted, any_value(p.outliers) AS outliers, "
        "any_value(p.imported_at) AS imported_at, "
        "any_value(e.runs) AS engine_runs, min(l.source) AS source "
        "FROM layer_profile l LEFT JOIN profile p USING "
        "(model, dtype, gpu_profile, tensor_parallel_size) "
        "LEFT JOIN (SELECT model, gpu_profile, tensor_parallel_size, count(*) AS runs "
        "FROM engine_point GROUP BY ALL) e USING (model, gpu_profile, tensor_parallel_size) "
        "GROUP BY l.model, l.dtype, l.gpu_profile, l.tensor_parallel_size "
        "ORDER BY imported_at DESC NULLS LAST, l.model, l.gpu_profile, l.dtype, tp"
    )
    columns = [column[0] for column in found.description or []]
    return columns, found.fetchall()


def read_engine_points(
    connection: duckdb.DuckDBPyConnection, model: str, gpu_profile: str, size: int
) -> list[tuple[int, int, int, float, float, float | None, float | None, int | None, str]]:
    """Runs of the whole engine: input, output, concurrency, TPOT, requests/s, layers, split.

    Measured before predicted; predictions are without the engine's overhead.
    """
    return connection.execute(
        "SELECT input_tokens, output_tokens, concurrency, measured_tpot_ms, predicted_tpot_ms, "
        "measured_throughput_rps, predicted_throughput_rps, layers, split FROM engine_point "
        "WHERE model = ? AND gpu_profile = ? AND tensor_parallel_size = ? ORDER BY ALL",
        [model, gpu_profile, size],
    ).fetchall()

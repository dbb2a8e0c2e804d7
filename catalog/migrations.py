"""Schema migrations: each a function, applied once, in order, in a transaction of its own.

Never edit one that was released; add another.
"""

from __future__ import annotations

from collections.abc import Callable

import duckdb

from catalog.errors import DatabaseNewerError
from catalog.fleet import m014_fleet
from catalog.market.schema import m010_market

Migration = Callable[[duckdb.DuckDBPyConnection], None]


def m001_seed_tables(connection: duckdb.DuckDBPyConnection) -> None:
    """What the planner reads: hardware, models, performance, market, demand."""
    connection.execute(
        """
        CREATE TABLE gpu (
            gpu TEXT PRIMARY KEY, profile_name TEXT NOT NULL, memory_gib DOUBLE NOT NULL,
            memory_bandwidth_gbyte_per_s DOUBLE NOT NULL, half_tflops DOUBLE NOT NULL,
            power_w DOUBLE NOT NULL, compute_capability DOUBLE NOT NULL, source TEXT NOT NULL);
        CREATE TABLE model (
            model TEXT PRIMARY KEY, dtype TEXT NOT NULL, layers INTEGER NOT NULL,
            hidden INTEGER NOT NULL, heads INTEGER NOT NULL, kv_heads INTEGER NOT NULL,
            head_dim INTEGER NOT NULL, intermediate INTEGER NOT NULL, experts INTEGER NOT NULL,
            experts_per_token INTEGER NOT NULL, moe_intermediate INTEGER NOT NULL,
            vocab INTEGER NOT NULL, weight_bytes DOUBLE NOT NULL,
            expert_weight_bytes DOUBLE NOT NULL, bytes_per_layer BIGINT NOT NULL,
            embed_bytes BIGINT NOT NULL, lm_head_bytes BIGINT NOT NULL,
            kv_bytes_per_token_per_layer BIGINT NOT NULL, hop_bytes_per_token BIGINT NOT NULL,
            note TEXT);
        CREATE TABLE instance_type (
            cloud TEXT NOT NULL, instance_type TEXT NOT NULL, node_class TEXT NOT NULL,
            gpu TEXT NOT NULL, gpu_count INTEGER NOT NULL, vcpus INTEGER NOT NULL,
            link TEXT NOT NULL, network_peak_gbit_per_s DOUBLE NOT NULL,
            network_baseline_gbit_per_s DOUBLE NOT NULL,
            source TEXT NOT NULL, PRIMARY KEY (cloud, instance_type));
        CREATE TABLE layer_profile (
            model TEXT NOT NULL, dtype TEXT NOT NULL, gpu_profile TEXT NOT NULL,
            tensor_parallel_size INTEGER NOT NULL, expert_parallel_size INTEGER NOT NULL,
            phase TEXT NOT NULL, batch INTEGER NOT NULL, tokens INTEGER NOT NULL,
            context INTEGER NOT NULL, linear_ms DOUBLE NOT NULL, attention_ms DOUBLE NOT NULL,
            communication_ms DOUBLE NOT NULL, head_ms DOUBLE NOT NULL, source TEXT NOT NULL);
        CREATE TABLE calibration (
            gpu_profile TEXT NOT NULL, scope TEXT NOT NULL, dtype TEXT NOT NULL,
            compute_efficiency DOUBLE NOT NULL, bandwidth_efficiency DOUBLE NOT NULL,
            fixed_overhead_us DOUBLE NOT NULL, measured BOOLEAN NOT NULL, source TEXT NOT NULL);
        CREATE TABLE all_reduce (
            gpu_profile TEXT NOT NULL, tensor_parallel_size INTEGER NOT NULL,
            message_bytes BIGINT NOT NULL, all_reduce_ms DOUBLE NOT NULL, source TEXT NOT NULL);
        CREATE TABLE all_reduce_fit (
            gpu_profile TEXT NOT NULL, interconnect TEXT NOT NULL,
            tensor_parallel_size INTEGER NOT NULL, latency_us DOUBLE NOT NULL,
            bus_bandwidth_gbyte_per_s DOUBLE NOT NULL, source TEXT NOT NULL);
        CREATE TABLE engine_point (
            model TEXT NOT NULL, gpu_profile TEXT NOT NULL, tensor_parallel_size INTEGER NOT NULL,
            input_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
            concurrency INTEGER NOT NULL, measured_ttft_ms DOUBLE NOT NULL,
            measured_tpot_ms DOUBLE NOT NULL, predicted_tpot_ms DOUBLE NOT NULL,
            split TEXT NOT NULL);
        CREATE TABLE offer (
            observed_at TIMESTAMPTZ NOT NULL, source TEXT NOT NULL, cloud TEXT NOT NULL,
            domain TEXT NOT NULL, zone TEXT, instance_type TEXT NOT NULL, gpu TEXT NOT NULL,
            gpu_count DOUBLE NOT NULL, market TEXT NOT NULL,
            price_usd_per_hour DOUBLE NOT NULL, rejected_because TEXT);
        CREATE TABLE availability (
            observed_at TIMESTAMPTZ NOT NULL, source TEXT NOT NULL, level TEXT NOT NULL,
            domain TEXT NOT NULL, instance_type TEXT NOT NULL, nodes INTEGER NOT NULL);
        CREATE TABLE length_distribution (
            name TEXT PRIMARY KEY, mean_input DOUBLE NOT NULL, mean_output DOUBLE NOT NULL,
            p95_input DOUBLE NOT NULL, p95_output DOUBLE NOT NULL, source TEXT NOT NULL);
        CREATE TABLE demand (
            trace TEXT NOT NULL, minute TIMESTAMP NOT NULL, requests INTEGER NOT NULL,
            input_tokens BIGINT NOT NULL, output_tokens BIGINT NOT NULL, source TEXT NOT NULL);
        """
    )


def m002_decisions(connection: duckdb.DuckDBPyConnection) -> None:
    """What Coral decided: the library and the allocations; appended, never overwritten."""
    connection.execute(
        """
        CREATE TABLE library_build (
            build_id TEXT NOT NULL, finished_at TIMESTAMPTZ NOT NULL, scenario TEXT NOT NULL,
            workload TEXT NOT NULL, phase TEXT NOT NULL, combinations INTEGER NOT NULL,
            reused INTEGER NOT NULL, solved INTEGER NOT NULL, kept INTEGER NOT NULL,
            outcomes JSON NOT NULL, seconds DOUBLE NOT NULL, solver TEXT NOT NULL,
            PRIMARY KEY (build_id, workload, phase));
        CREATE TABLE solution (
            solution_id TEXT PRIMARY KEY, built_at TIMESTAMPTZ NOT NULL, workload TEXT NOT NULL,
            phase TEXT NOT NULL, combination JSON NOT NULL, outcome TEXT NOT NULL,
            best_rps DOUBLE NOT NULL, proven BOOLEAN NOT NULL, ilps INTEGER NOT NULL,
            seconds DOUBLE NOT NULL);
        CREATE TABLE template (
            template_id TEXT PRIMARY KEY, built_at TIMESTAMPTZ NOT NULL, workload TEXT NOT NULL,
            phase TEXT NOT NULL, model TEXT NOT NULL, ttft_ms DOUBLE NOT NULL,
            tpot_ms DOUBLE NOT NULL, mean_input DOUBLE NOT NULL, mean_output DOUBLE NOT NULL,
            combination JSON NOT NULL, nodes INTEGER NOT NULL,
            throughput_rps DOUBLE NOT NULL, raw_rps DOUBLE NOT NULL, cycle_ms DOUBLE NOT NULL,
            latency_ms DOUBLE NOT NULL, micro_batches INTEGER NOT NULL,
            micro_batch_size INTEGER NOT NULL, placement TEXT NOT NULL, provenance TEXT NOT NULL);
        CREATE TABLE template_stage (
            template_id TEXT NOT NULL, stage INTEGER NOT NULL, position INTEGER NOT NULL,
            first_layer INTEGER NOT NULL, layers INTEGER NOT NULL, node_class TEXT NOT NULL,
            tensor_parallel_size INTEGER NOT NULL, data_parallel_size INTEGER NOT NULL,
            batch INTEGER NOT NULL, PRIMARY KEY (template_id, stage, position));
        CREATE TABLE template_share (
            template_id TEXT NOT NULL, share_id TEXT NOT NULL, workload TEXT NOT NULL,
            throughput_rps DOUBLE NOT NULL, PRIMARY KEY (template_id, share_id));
        CREATE TABLE workload (
            decision_id TEXT NOT NULL, observed_at TIMESTAMPTZ NOT NULL, scenario TEXT NOT NULL,
            workload TEXT NOT NULL, model TEXT NOT NULL, dtype TEXT NOT NULL,
            ttft_ms DOUBLE NOT NULL, tpot_ms DOUBLE NOT NULL, mean_input DOUBLE NOT NULL,
            mean_output DOUBLE NOT NULL, p95_input DOUBLE NOT NULL, p95_output DOUBLE NOT NULL,
            demand_rps DOUBLE NOT NULL);
        CREATE TABLE allocation (
            allocation_id TEXT PRIMARY KEY, decision_id TEXT NOT NULL,
            created_at TIMESTAMPTZ NOT NULL, scenario TEXT NOT NULL, planner TEXT NOT NULL,
            templates INTEGER NOT NULL, cost_usd_per_hour DOUBLE NOT NULL,
            objective_usd DOUBLE NOT NULL, bound_usd DOUBLE NOT NULL, gap DOUBLE NOT NULL,
            proven BOOLEAN NOT NULL, solve_s DOUBLE NOT NULL, served_share DOUBLE NOT NULL,
            stock_note TEXT NOT NULL, fingerprint TEXT NOT NULL,
            applied BOOLEAN NOT NULL);
        CREATE TABLE allocation_nodes (
            allocation_id TEXT NOT NULL, domain TEXT NOT NULL, zone TEXT,
            instance_type TEXT NOT NULL, node_class TEXT NOT NULL, market TEXT NOT NULL,
            nodes INTEGER NOT NULL, price_usd_per_hour DOUBLE NOT NULL, stock INTEGER NOT NULL,
            worth_usd_per_hour DOUBLE);
        CREATE TABLE allocation_item (
            allocation_id TEXT NOT NULL, domain TEXT NOT NULL, template_id TEXT NOT NULL,
            replicas INTEGER NOT NULL, workload TEXT NOT NULL, load_rps DOUBLE NOT NULL);
        CREATE TABLE allocation_binding (
            allocation_id TEXT NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,
            used DOUBLE NOT NULL, amount DOUBLE NOT NULL, unit TEXT NOT NULL,
            worth DOUBLE NOT NULL, worth_unit TEXT NOT NULL);
        CREATE TABLE allocation_service (
            allocation_id TEXT NOT NULL, workload TEXT NOT NULL, demand_rps DOUBLE NOT NULL,
            served_rps DOUBLE NOT NULL);
        """
    )


def m003_views(connection: duckdb.DuckDBPyConnection) -> None:
    """What analysts ask for first."""
    connection.execute(
        """
        CREATE VIEW latest_price AS
            SELECT o.domain, o.instance_type, i.node_class, o.market,
                   min(o.price_usd_per_hour) AS price_usd_per_hour,
                   max(o.observed_at) AS observed_at
            FROM offer o JOIN instance_type i
              ON i.cloud = o.cloud AND i.instance_type = o.instance_type
            WHERE o.rejected_because IS NULL
              AND o.observed_at = (SELECT max(observed_at) FROM offer)
            GROUP BY ALL;
        CREATE VIEW best_templates AS
            WITH node_price AS (
                SELECT node_class, min(price_usd_per_hour) AS price_usd_per_hour
                FROM latest_price WHERE market = 'on_demand' GROUP BY node_class),
            cost AS (
                SELECT s.template_id, sum(p.price_usd_per_hour) AS usd_per_hour
                FROM template_stage s JOIN node_price p USING (node_class)
                GROUP BY s.template_id)
            SELECT model, workload, phase, ttft_ms, tpot_ms,
                   round(throughput_rps * 3600 / usd_per_hour * CASE phase
                       WHEN 'prefill' THEN mean_input
                       WHEN 'decode' THEN mean_output
                       ELSE mean_input + mean_output END) AS tokens_per_usd,
                   throughput_rps, usd_per_hour, nodes, placement, provenance, template_id
            FROM template JOIN cost USING (template_id)
            ORDER BY model, workload, phase, ttft_ms, tokens_per_usd DESC;
        CREATE VIEW allocation_history AS
            SELECT created_at, scenario, planner, cost_usd_per_hour, served_share, gap, proven,
                   solve_s, templates, decision_id, allocation_id
            FROM allocation ORDER BY created_at DESC;
        CREATE VIEW rejected_offers AS
            SELECT observed_at, source, rejected_because, count(*) AS offers
            FROM offer WHERE rejected_because IS NOT NULL GROUP BY ALL;
        """
    )


def m004_searches(connection: duckdb.DuckDBPyConnection) -> None:
    """Solvers search with programs of any kind, not only ILPs."""
    connection.execute("ALTER TABLE solution RENAME COLUMN ilps TO searches")
    connection.execute("ALTER TABLE library_build ADD COLUMN searched INTEGER")


def m005_effort(connection: duckdb.DuckDBPyConnection) -> None:
    """What an allocation's search looked at, and where its time went (null before)."""
    connection.execute(
        """
        ALTER TABLE allocation ADD COLUMN solver TEXT;
        ALTER TABLE allocation ADD COLUMN shortfall_gap DOUBLE;
        ALTER TABLE allocation ADD COLUMN columns_seen INTEGER;
        ALTER TABLE allocation ADD COLUMN columns_kept INTEGER;
        ALTER TABLE allocation ADD COLUMN phase_seconds TEXT;
        CREATE OR REPLACE VIEW allocation_history AS
            SELECT created_at, scenario, planner, cost_usd_per_hour, served_share, gap, proven,
                   solve_s, templates, decision_id, allocation_id, objective_usd, bound_usd,
                   shortfall_gap, CASE WHEN proven THEN 'gap' ELSE 'deadline' END AS stopped_at,
                   solver, columns_seen, columns_kept, phase_seconds
            FROM allocation ORDER BY created_at DESC;
        """
    )


def m006_class_worth(connection: duckdb.DuckDBPyConnection) -> None:
    """What one more node of every class would have been worth to a plan."""
    connection.execute(
        """
        CREATE TABLE allocation_class_worth (
            allocation_id TEXT NOT NULL, node_class TEXT NOT NULL, domain TEXT NOT NULL,
            worth DOUBLE NOT NULL, worth_unit TEXT NOT NULL);
        """
    )


def m007_demand_history(connection: duckdb.DuckDBPyConnection) -> None:
    """Rates of streams of requests over days, for forecasts."""
    connection.execute(
        """
        CREATE TABLE demand_history (
            series TEXT NOT NULL, window_start TIMESTAMP NOT NULL, window_minutes DOUBLE NOT NULL,
            requests_per_s DOUBLE NOT NULL, source TEXT NOT NULL);
        """
    )


def m008_seed_imports(connection: duckdb.DuckDBPyConnection) -> None:
    """Which shipped data a home has: newer data adds the rows that it lacks."""
    connection.execute(
        "CREATE TABLE seed_import (digest TEXT PRIMARY KEY, imported_at TIMESTAMPTZ NOT NULL)"
    )


def m009_profiles(connection: duckdb.DuckDBPyConnection) -> None:
    """Profiles of one's own: what was imported, throughput beside TPOT, hops."""
    connection.execute(
        """
        ALTER TABLE engine_point ADD COLUMN layers INTEGER;
        ALTER TABLE engine_point ADD COLUMN measured_throughput_rps DOUBLE;
        ALTER TABLE engine_point ADD COLUMN predicted_throughput_rps DOUBLE;
        ALTER TABLE engine_point ADD COLUMN source TEXT;
        CREATE TABLE profile (
            model TEXT NOT NULL, dtype TEXT NOT NULL, gpu_profile TEXT NOT NULL,
            tensor_parallel_size INTEGER NOT NULL, imported_at TIMESTAMPTZ NOT NULL,
            rows INTEGER NOT NULL, lifted INTEGER NOT NULL, outliers INTEGER NOT NULL,
            source TEXT NOT NULL, provenance JSON NOT NULL);
        CREATE TABLE hop (
            gpu_profile TEXT NOT NULL, message_bytes BIGINT NOT NULL, hop_ms DOUBLE NOT NULL,
            source TEXT NOT NULL);
        """
    )


def m011_simulations(connection: duckdb.DuckDBPyConnection) -> None:
    """What simulations of plans and replays of days said, and the caps calibrated by them."""
    connection.execute(
        """
        CREATE TABLE simulation (
            simulation_id TEXT NOT NULL, simulated_at TIMESTAMPTZ NOT NULL,
            scenario TEXT NOT NULL, decision_id TEXT NOT NULL, trace TEXT NOT NULL,
            minutes DOUBLE NOT NULL, load DOUBLE NOT NULL, seed INTEGER NOT NULL,
            workload TEXT NOT NULL, planned_rps DOUBLE NOT NULL, offered_rps DOUBLE NOT NULL,
            requests BIGINT NOT NULL, done BIGINT NOT NULL, lost BIGINT NOT NULL,
            too_long BIGINT NOT NULL, failed BIGINT NOT NULL, unfinished BIGINT NOT NULL,
            attainment DOUBLE NOT NULL, ttft_attainment DOUBLE NOT NULL,
            tpot_attainment DOUBLE NOT NULL, goodput_rps DOUBLE NOT NULL,
            goodput_tokens_per_s DOUBLE NOT NULL, output_tokens_per_s DOUBLE NOT NULL,
            ttft_p50_ms DOUBLE, ttft_p95_ms DOUBLE, tpot_p50_ms DOUBLE, tpot_p95_ms DOUBLE,
            queue_p95_ms DOUBLE, preemptions BIGINT NOT NULL,
            cost_usd_per_hour DOUBLE NOT NULL, simulate_s DOUBLE NOT NULL,
            PRIMARY KEY (simulation_id, workload));
        CREATE TABLE utilization_cap (
            calibrated_at TIMESTAMPTZ NOT NULL, scenario TEXT NOT NULL, workload TEXT NOT NULL,
            phase TEXT NOT NULL, terms TEXT NOT NULL, cap DOUBLE NOT NULL,
            assumed DOUBLE NOT NULL, attainment DOUBLE NOT NULL, target DOUBLE NOT NULL,
            simulations INTEGER NOT NULL, source TEXT NOT NULL);
        CREATE TABLE evaluation (
            evaluated_at TIMESTAMPTZ NOT NULL, evaluation_id TEXT NOT NULL,
            scenario TEXT NOT NULL, seed INTEGER NOT NULL, every_minutes DOUBLE NOT NULL,
            market_source TEXT NOT NULL, planner TEXT NOT NULL, hours DOUBLE NOT NULL,
            usd_per_hour DOUBLE NOT NULL, nodes INTEGER NOT NULL, lost_nodes INTEGER NOT NULL,
            replicas_started INTEGER NOT NULL, planned_rps DOUBLE NOT NULL,
            demand_rps DOUBLE NOT NULL, requests BIGINT NOT NULL, attainment DOUBLE NOT NULL,
            goodput_tokens_per_s DOUBLE NOT NULL, solve_s DOUBLE NOT NULL);
        """
    )


def m012_template_caps(connection: duckdb.DuckDBPyConnection) -> None:
    """Calibrated caps of single templates; empty: all others of the phase."""
    connection.execute("ALTER TABLE utilization_cap ADD COLUMN template_id TEXT DEFAULT ''")


def m013_observed_demand(connection: duckdb.DuckDBPyConnection) -> None:
    """What gateways saw, by model and minute, and the inbox files that are in."""
    connection.execute(
        """
        CREATE TABLE observed_demand (
            minute TIMESTAMPTZ NOT NULL, model TEXT NOT NULL, gateway TEXT NOT NULL,
            requests BIGINT NOT NULL, turned_away BIGINT NOT NULL, measured BIGINT NOT NULL,
            prompt_tokens BIGINT NOT NULL, output_tokens BIGINT NOT NULL,
            prompt_tokens_p95 DOUBLE, output_tokens_p95 DOUBLE, source TEXT NOT NULL);
        CREATE TABLE inbox_file (
            name TEXT PRIMARY KEY, loaded_at TIMESTAMPTZ NOT NULL, rows BIGINT NOT NULL);
        CREATE VIEW demand_by_minute AS
            SELECT minute, model, sum(requests) AS requests, sum(turned_away) AS turned_away,
                sum(prompt_tokens) AS prompt_tokens, sum(output_tokens) AS output_tokens,
                sum(prompt_tokens) / nullif(sum(measured), 0) AS prompt_tokens_mean,
                sum(output_tokens) / nullif(sum(measured), 0) AS output_tokens_mean,
                max(prompt_tokens_p95) AS prompt_tokens_p95,
                max(output_tokens_p95) AS output_tokens_p95
            FROM observed_demand GROUP BY ALL ORDER BY ALL;
        """
    )


def m015_corrections(connection: duckdb.DuckDBPyConnection) -> None:
    """What replicas did, by minute, and what that corrects of their templates."""
    connection.execute(
        """
        CREATE TABLE observed_replica (
            minute TIMESTAMPTZ NOT NULL, replica TEXT NOT NULL, template TEXT NOT NULL,
            model TEXT NOT NULL, phase TEXT NOT NULL, gateway TEXT NOT NULL,
            in_flight_s DOUBLE NOT NULL, decoding_s DOUBLE NOT NULL,
            decoding_sq_s DOUBLE NOT NULL, decode_s DOUBLE NOT NULL, measured BIGINT NOT NULL,
            prompt_tokens BIGINT NOT NULL, output_tokens BIGINT NOT NULL,
            other_tokens BIGINT NOT NULL, decode_tokens BIGINT NOT NULL, source TEXT NOT NULL);
        CREATE TABLE correction (
            corrected_at TIMESTAMPTZ NOT NULL, scenario TEXT NOT NULL, template_id TEXT NOT NULL,
            workload TEXT NOT NULL, phase TEXT NOT NULL, factor DOUBLE NOT NULL,
            speed DOUBLE NOT NULL, kind TEXT NOT NULL, minutes BIGINT NOT NULL,
            replicas BIGINT NOT NULL, among DOUBLE NOT NULL, observed DOUBLE NOT NULL,
            predicted DOUBLE NOT NULL, profile_row TEXT NOT NULL,
            first_minute TIMESTAMPTZ NOT NULL, last_minute TIMESTAMPTZ NOT NULL);
        CREATE VIEW replica_by_minute AS
            SELECT minute, replica, template, model, phase, count(*) AS gateways,
                sum(in_flight_s) / 60 AS in_flight, sum(decoding_s) / 60 AS decoding,
                (sum(decoding_sq_s) + (sum(decoding_s) ** 2 - sum(decoding_s ** 2)) / 60)
                    / nullif(sum(decoding_s), 0) AS among,
                1000 * sum(decode_s) / nullif(sum(decode_tokens), 0) AS tpot_ms,
                sum(decode_tokens)::BIGINT AS timed_tokens,
                sum(measured) / 60 AS requests_per_s,
                (sum(output_tokens) + sum(other_tokens)) / 60 AS output_tokens_per_s,
                sum(measured)::BIGINT AS measured, sum(prompt_tokens)::BIGINT AS prompt_tokens,
                sum(output_tokens)::BIGINT AS output_tokens
            FROM observed_replica GROUP BY ALL;
        CREATE VIEW correction_now AS
            SELECT * FROM correction
            QUALIFY row_number() OVER (
                PARTITION BY scenario, template_id ORDER BY corrected_at DESC) = 1;
        CREATE VIEW correction_evidence AS
            SELECT c.scenario, c.template_id, c.corrected_at, c.factor, m.minute, m.replica,
                m.in_flight, m.decoding, m.among, m.tpot_ms, m.output_tokens_per_s,
                m.requests_per_s, m.measured
            FROM correction c JOIN replica_by_minute m ON m.template = c.template_id
                AND m.minute BETWEEN c.first_minute AND c.last_minute;
        """
    )


def m016_met_objectives(connection: duckdb.DuckDBPyConnection) -> None:
    """How many streams that gateways saw met their objectives."""
    for name in ("judged", "ttft_met", "tpot_met", "both_met"):
        connection.execute(f"ALTER TABLE observed_demand ADD COLUMN {name} BIGINT DEFAULT 0")
    connection.execute(
        """
        CREATE VIEW attainment_by_minute AS
            SELECT minute, model, sum(judged)::BIGINT AS judged,
                sum(both_met) / sum(judged) AS attainment,
                sum(ttft_met) / sum(judged) AS ttft_attainment,
                sum(tpot_met) / sum(judged) AS tpot_attainment
            FROM observed_demand GROUP BY ALL HAVING sum(judged) > 0;
        """
    )


MIGRATIONS: tuple[Migration, ...] = (
    m001_seed_tables,
    m002_decisions,
    m003_views,
    m004_searches,
    m005_effort,
    m006_class_worth,
    m007_demand_history,
    m008_seed_imports,
    m009_profiles,
    m010_market,
    m011_simulations,
    m012_template_caps,
    m013_observed_demand,
    m014_fleet,
    m015_corrections,
    m016_met_objectives,
)


def migrate(connection: duckdb.DuckDBPyConnection) -> int:
    """Apply what is missing; returns how many were applied.

    Raises DatabaseNewerError: the file was written by a Coral with more migrations.
    """
    connection.execute(
        "CREATE TABLE IF NOT EXISTS schema_version "
        "(version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at TIMESTAMPTZ NOT NULL)"
    )
    current = schema_version(connection)
    if current > len(MIGRATIONS):
        raise DatabaseNewerError(
            f"the database has schema version {current} and this Coral knows up to "
            f"{len(MIGRATIONS)}; upgrade Coral, or choose another home with --home"
        )
    for version, migration in enumerate(MIGRATIONS[current:], start=current + 1):
        connection.begin()
        try:
            migration(connection)
            connection.execute(
                "INSERT INTO schema_version VALUES (?, ?, now())", [version, migration.__name__]
            )
        except BaseException:
            connection.rollback()
            raise
        connection.commit()
    return len(MIGRATIONS) - current


def schema_version(connection: duckdb.DuckDBPyConnection) -> int:
    """Version of an open database."""
    # fetchall: DuckDB refuses further work on a connection with an unfinished result.
    rows = connection.execute("SELECT coalesce(max(version), 0) FROM schema_version").fetchall()
    return int(rows[0][0])

"""Leases as analysts see them: a copy of what the fleet's own file says, and views on it."""

from __future__ import annotations

import duckdb
import polars as pl

TABLES = """
CREATE TABLE lease (
    lease_id TEXT PRIMARY KEY, scenario TEXT NOT NULL, domain TEXT NOT NULL, zone TEXT,
    instance_type TEXT NOT NULL, node_class TEXT NOT NULL, market TEXT NOT NULL,
    price_usd_per_hour DOUBLE NOT NULL, fleet TEXT NOT NULL, state TEXT NOT NULL,
    reason TEXT NOT NULL, replica_id TEXT, instance_id TEXT, created_at TIMESTAMPTZ NOT NULL,
    ready_at TIMESTAMPTZ, ended_at TIMESTAMPTZ);
CREATE TABLE lease_event (
    number BIGINT PRIMARY KEY, lease_id TEXT NOT NULL, happened_at TIMESTAMPTZ NOT NULL,
    state TEXT NOT NULL, reason TEXT NOT NULL);
ALTER TABLE allocation_service ADD COLUMN cost_usd_per_hour DOUBLE;
ALTER TABLE evaluation ADD COLUMN plans INTEGER;
"""

VIEWS = """
CREATE VIEW fleet_now AS
    SELECT scenario, domain, node_class, instance_type, market, state, count(*) AS nodes,
           sum(price_usd_per_hour) AS usd_per_hour
    FROM lease WHERE state NOT IN ('terminated', 'failed') GROUP BY ALL ORDER BY ALL;
CREATE VIEW spend_by_day AS
    WITH span AS (
        SELECT scenario, domain, node_class, market, price_usd_per_hour,
               created_at AT TIME ZONE 'UTC' AS began,
               coalesce(ended_at, now()) AT TIME ZONE 'UTC' AS ended
        FROM lease WHERE instance_id IS NOT NULL),
    days AS (
        SELECT *, unnest(generate_series(
            date_trunc('day', began), date_trunc('day', ended), INTERVAL 1 DAY)) AS day
        FROM span)
    SELECT day::DATE AS day, scenario, domain, node_class, market,
           sum(date_diff('second', greatest(began, day), least(ended, day + INTERVAL 1 DAY))
               / 3600.0) AS node_hours,
           sum(date_diff('second', greatest(began, day), least(ended, day + INTERVAL 1 DAY))
               / 3600.0 * price_usd_per_hour) AS usd
    FROM days GROUP BY ALL ORDER BY ALL;
CREATE VIEW model_cost AS
    SELECT a.created_at, a.scenario, w.model, s.workload, s.cost_usd_per_hour,
           s.demand_rps, s.served_rps, a.applied, a.decision_id
    FROM allocation a JOIN allocation_service s USING (allocation_id)
    JOIN workload w ON w.decision_id = a.decision_id AND w.workload = s.workload
    WHERE a.planner = 'coral' ORDER BY ALL;
CREATE VIEW model_cost_by_day AS
    WITH plan AS (
        SELECT scenario, model, workload, cost_usd_per_hour, served_rps,
               created_at AT TIME ZONE 'UTC' AS began,
               lead(created_at, 1, now()) OVER (
                   PARTITION BY scenario, workload ORDER BY created_at) AT TIME ZONE 'UTC' AS ended
        FROM model_cost WHERE applied),
    days AS (
        SELECT *, unnest(generate_series(
            date_trunc('day', began), date_trunc('day', ended), INTERVAL 1 DAY)) AS day
        FROM plan),
    parts AS (
        SELECT *, date_diff('second', greatest(began, day), least(ended, day + INTERVAL 1 DAY))
               / 3600.0 AS hours
        FROM days)
    SELECT day::DATE AS day, scenario, model, sum(hours * cost_usd_per_hour) AS usd,
           sum(hours * served_rps) * 3600 AS requests_planned
    FROM parts GROUP BY ALL ORDER BY ALL;
"""


def m014_fleet(connection: duckdb.DuckDBPyConnection) -> None:
    """Leases and their events beside the plans, the cost of a plan by workload, plans of a replay."""
    connection.execute(TABLES)
    connection.execute(VIEWS)


def last_event(connection: duckdb.DuckDBPyConnection) -> int:
    """The number of the last event that is in; 0 where none is."""
    return int(
        connection.execute("SELECT coalesce(max(number), 0) FROM lease_event").fetchall()[0][0]
    )


def write_leases(
    connection: duckdb.DuckDBPyConnection, leases: pl.DataFrame, events: pl.DataFrame
) -> None:
    """Leases in place of what was said of them before, events behind those that are in."""
    connection.register("new_leases", leases)
    connection.register("new_events", events)
    connection.execute("INSERT OR REPLACE INTO lease BY NAME SELECT * FROM new_leases")
    connection.execute("INSERT INTO lease_event BY NAME SELECT * FROM new_events")
    connection.unregister("new_leases")
    connection.unregister("new_events")

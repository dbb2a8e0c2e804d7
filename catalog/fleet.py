"""Leases as analysts see them: a copy of what the fleet's own file says, and views on it."""

from __future__ import annotations

from datetime import UTC, datetime

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
    WITH last AS (
        SELECT allocation_id, decision_id, created_at, scenario, applied FROM allocation
        WHERE planner = 'coral'
        QUALIFY row_number() OVER (PARTITION BY scenario, created_at ORDER BY rowid DESC) = 1)
    SELECT a.created_at, a.scenario, w.model, s.workload, s.cost_usd_per_hour,
           s.demand_rps, s.served_rps, a.applied, a.decision_id
    FROM last a JOIN allocation_service s USING (allocation_id)
    JOIN workload w ON w.decision_id = a.decision_id AND w.workload = s.workload
    ORDER BY ALL;
CREATE VIEW model_cost_by_day AS
    WITH fleet AS (
        SELECT scenario, CASE WHEN count(*) FILTER (WHERE ended_at IS NULL) = 0
               THEN max(ended_at) END AS over_at
        FROM lease GROUP BY scenario),
    moment AS (SELECT DISTINCT scenario, created_at FROM model_cost WHERE applied),
    span AS (
        SELECT m.scenario, m.created_at, m.created_at AT TIME ZONE 'UTC' AS began,
               greatest(m.created_at, coalesce(
                   lead(m.created_at) OVER (PARTITION BY m.scenario ORDER BY m.created_at),
                   f.over_at, now())) AT TIME ZONE 'UTC' AS ended
        FROM moment m LEFT JOIN fleet f USING (scenario)),
    days AS (
        SELECT *, unnest(generate_series(
            date_trunc('day', began), date_trunc('day', ended), INTERVAL 1 DAY)) AS day
        FROM span),
    parts AS (
        SELECT *, date_diff('second', greatest(began, day), least(ended, day + INTERVAL 1 DAY))
               / 3600.0 AS hours
        FROM days)
    SELECT p.day::DATE AS day, c.scenario, c.model, sum(p.hours * c.cost_usd_per_hour) AS usd,
           sum(p.hours * c.served_rps) * 3600 AS requests_planned
    FROM parts p JOIN model_cost c ON c.scenario = p.scenario AND c.created_at = p.created_at
     AND c.applied
    GROUP BY ALL ORDER BY ALL;
"""


def m014_fleet(connection: duckdb.DuckDBPyConnection) -> None:
    """Leases and their events beside the plans, what plans cost by workload, and views."""
    connection.execute(TABLES)
    connection.execute(VIEWS)


def read_last_event(
    connection: duckdb.DuckDBPyConnection,
) -> tuple[int, str, datetime] | None:
    """Number, lease and time of the last event that is in; None where none is."""
    rows = connection.execute(
        "SELECT number, lease_id, happened_at FROM lease_event ORDER BY number DESC LIMIT 1"
    ).fetchall()
    return (rows[0][0], rows[0][1], rows[0][2].astimezone(UTC)) if rows else None


def clear_leases(connection: duckdb.DuckDBPyConnection) -> None:
    """Before all of another lease file is taken in."""
    connection.execute("DELETE FROM lease")
    connection.execute("DELETE FROM lease_event")


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

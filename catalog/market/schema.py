"""Tables and views of the market."""

from __future__ import annotations

import duckdb

# Reasons for which a row is put aside while the price before it stays in force.
ASIDE = ("jump", "duplicate", "observed in the future")
IS_ASIDE = " OR ".join(f"starts_with(rejected_because, '{reason}')" for reason in ASIDE)
# Two answers further apart than this have a gap between them.
GAP_MINUTES = 30

TABLES = """
ALTER TABLE offer ADD COLUMN feed TEXT DEFAULT 'snapshot';
ALTER TABLE offer ADD COLUMN listed BOOLEAN DEFAULT true;
ALTER TABLE offer ADD COLUMN nodes INTEGER;
ALTER TABLE offer ADD COLUMN pulled_at TIMESTAMPTZ;
CREATE TABLE market_watch (
    feed TEXT NOT NULL, domain TEXT NOT NULL, part TEXT NOT NULL, outcome TEXT NOT NULL,
    detail TEXT NOT NULL, first_at TIMESTAMPTZ NOT NULL, last_at TIMESTAMPTZ NOT NULL,
    pulls INTEGER NOT NULL);
CREATE TABLE placement_score (
    observed_at TIMESTAMPTZ NOT NULL, feed TEXT NOT NULL, domain TEXT NOT NULL,
    instance_type TEXT NOT NULL, asked_for TEXT NOT NULL, nodes INTEGER NOT NULL,
    score INTEGER NOT NULL);
CREATE TABLE quota (
    observed_at TIMESTAMPTZ NOT NULL, feed TEXT NOT NULL, domain TEXT NOT NULL,
    family TEXT NOT NULL, instance_types TEXT NOT NULL, market TEXT NOT NULL,
    limit_vcpus DOUBLE NOT NULL, used_vcpus DOUBLE NOT NULL, own_vcpus DOUBLE NOT NULL);
CREATE TABLE instance_fact (
    observed_at TIMESTAMPTZ NOT NULL, feed TEXT NOT NULL, cloud TEXT NOT NULL,
    instance_type TEXT NOT NULL, gpu TEXT NOT NULL, gpu_count INTEGER NOT NULL,
    gpu_memory_gib DOUBLE NOT NULL, vcpus INTEGER NOT NULL, memory_gib DOUBLE NOT NULL,
    network_gbit_per_s DOUBLE, PRIMARY KEY (feed, cloud, instance_type));
CREATE TABLE zone_offering (
    feed TEXT NOT NULL, domain TEXT NOT NULL, zone TEXT NOT NULL, instance_type TEXT NOT NULL,
    first_at TIMESTAMPTZ NOT NULL, last_at TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (feed, domain, zone, instance_type));
CREATE TABLE launch_result (
    happened_at TIMESTAMPTZ NOT NULL, lease_id TEXT NOT NULL, domain TEXT NOT NULL, zone TEXT,
    instance_type TEXT NOT NULL, market TEXT NOT NULL, outcome TEXT NOT NULL,
    detail TEXT NOT NULL, PRIMARY KEY (lease_id, outcome));
"""

# The newest row of a key says whether it is offered: rejected or no longer listed, it is not.
PRICE_NOW = f"""
CREATE VIEW price_now AS
    WITH newest AS (
        SELECT feed, domain, zone, instance_type, market, any_value(cloud) AS cloud,
               arg_max(price_usd_per_hour, observed_at) AS price_usd_per_hour,
               nullif(arg_max(coalesce(nodes, -1), observed_at), -1) AS nodes,
               arg_max(listed AND rejected_because IS NULL, observed_at) AS offered,
               arg_max(source, observed_at) AS source, max(observed_at) AS since
        FROM offer
        WHERE (rejected_because IS NULL OR NOT ({IS_ASIDE}))
          AND (feed <> 'snapshot'
               OR observed_at = (SELECT max(observed_at) FROM offer WHERE feed = 'snapshot'))
        GROUP BY feed, domain, zone, instance_type, market),
    seen AS (
        SELECT feed, domain, part, max(last_at) AS seen_at FROM market_watch
        WHERE outcome = 'seen' GROUP BY feed, domain, part)
    SELECT n.feed, n.domain, n.zone, n.instance_type, i.node_class, i.gpu, i.gpu_count, n.market,
           n.price_usd_per_hour, n.nodes, n.since, coalesce(s.seen_at, n.since) AS seen_at,
           n.source, i.vcpus
    FROM newest n
    JOIN instance_type i ON i.cloud = n.cloud AND i.instance_type = n.instance_type
    LEFT JOIN seen s ON s.feed = n.feed AND s.domain = n.domain AND s.part = n.market
    WHERE n.offered;
"""

VIEWS = f"""
CREATE OR REPLACE VIEW latest_price AS
    SELECT domain, instance_type, node_class, market,
           min(price_usd_per_hour) AS price_usd_per_hour, max(seen_at) AS observed_at
    FROM (SELECT domain, instance_type, node_class, market, price_usd_per_hour, seen_at,
                 rank() OVER (PARTITION BY domain, market ORDER BY seen_at DESC) AS place
          FROM price_now)
    WHERE place = 1 GROUP BY ALL;
CREATE VIEW price_change AS
    SELECT feed, domain, zone, instance_type, market, observed_at,
           lag(price_usd_per_hour) OVER one AS before_usd_per_hour, price_usd_per_hour,
           price_usd_per_hour / lag(price_usd_per_hour) OVER one - 1 AS change,
           observed_at - lag(observed_at) OVER one AS lasted
    FROM offer WHERE rejected_because IS NULL AND listed
    WINDOW one AS (PARTITION BY feed, domain, zone, instance_type, market ORDER BY observed_at)
    QUALIFY before_usd_per_hour <> price_usd_per_hour;
CREATE VIEW capacity_failure AS
    SELECT domain, zone, instance_type, market,
           count(*) FILTER (WHERE outcome = 'launched') AS launched,
           count(*) FILTER (WHERE outcome = 'no_capacity') AS no_capacity,
           count(*) FILTER (WHERE outcome = 'preempted') AS preempted,
           max(happened_at) FILTER (WHERE outcome <> 'launched') AS last_failure_at,
           arg_max(detail, happened_at) FILTER (WHERE outcome <> 'launched') AS last_detail
    FROM launch_result GROUP BY ALL HAVING count(*) FILTER (WHERE outcome <> 'launched') > 0;
CREATE VIEW market_gap AS
    WITH spans AS (
        SELECT feed, domain, part, last_at AS gap_from,
               lead(first_at) OVER (PARTITION BY feed, domain, part ORDER BY first_at) AS gap_to
        FROM market_watch WHERE outcome = 'seen')
    SELECT g.feed, g.domain, g.part, g.gap_from, g.gap_to,
           date_diff('second', g.gap_from, coalesce(g.gap_to, now())) / 60.0 AS minutes,
           coalesce(arg_max(f.detail, f.last_at), 'not asked') AS why
    FROM spans g LEFT JOIN market_watch f
      ON f.outcome = 'failed' AND f.feed = g.feed AND f.domain = g.domain AND f.part = g.part
     AND f.first_at >= g.gap_from AND (g.gap_to IS NULL OR f.first_at < g.gap_to)
    WHERE coalesce(g.gap_to, now()) - g.gap_from > INTERVAL {GAP_MINUTES} MINUTE
    GROUP BY g.feed, g.domain, g.part, g.gap_from, g.gap_to;
"""


def m010_market(connection: duckdb.DuckDBPyConnection) -> None:
    """Prices of live sources as changes, what was asked when, evidence of availability, views."""
    connection.execute(TABLES)
    connection.execute(PRICE_NOW)
    connection.execute(VIEWS)

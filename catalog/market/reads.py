"""Reads of the market: prices in force, what is stored of a source, evidence of availability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import duckdb
import polars as pl

from catalog.market.pull import TIME
from catalog.market.schema import IS_ASIDE
from planner.availability import LaunchOutcome, LaunchResult, PlacementScore, QuotaState
from planner.known import MarketRow
from planner.types import Market

STORED: dict[str, pl.DataType | type[pl.DataType]] = {
    "domain": pl.String, "zone": pl.String, "instance_type": pl.String, "market": pl.String,
    "observed_at": TIME, "price_usd_per_hour": pl.Float64, "nodes": pl.Int32,
    "rejected_because": pl.String, "listed": pl.Boolean,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FeedState:
    """What is known of one source of prices."""

    feed: str
    offers: int  # in force
    seen_at: datetime | None  # the oldest part; None: never answered
    rejected: dict[str, int]  # offers whose newest row was refused, by reason


def frame_of(
    connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[object] = ()
) -> pl.DataFrame:
    """A query's result as a frame."""
    found: pl.DataFrame = connection.sql(sql, params=list(parameters) or None).pl()
    return found


def read_stored(
    connection: duckdb.DuckDBPyConnection, feed: str, domains: Sequence[str]
) -> pl.DataFrame:
    """The newest rows of every offer: two that count, and the last of each kind put aside."""
    row = (
        "{'observed_at': observed_at, 'price_usd_per_hour': price_usd_per_hour, 'nodes': nodes, "
        "'rejected_because': rejected_because, 'listed': listed}"
    )
    aside = f"coalesce({IS_ASIDE}, false)"
    where = "FROM offer WHERE feed = $1 AND domain IN (SELECT unnest($2::TEXT[]))"
    by = "domain, zone, instance_type, market"
    frame = frame_of(
        connection,
        f"SELECT {by}, unnest(arg_max({row}, observed_at, 2), recursive := true) {where} "
        f"AND NOT {aside} GROUP BY {by} UNION ALL "
        f"SELECT {by}, unnest(arg_max({row}, observed_at, 1), recursive := true) {where} "
        f"AND {aside} GROUP BY {by}, rejected_because",
        [feed, list(domains)],
    )
    return frame.select(
        pl.col(name).dt.convert_time_zone("UTC").cast(kind)
        if kind == TIME and frame.height
        else pl.col(name).cast(kind)
        for name, kind in STORED.items()
    )


def read_known_types(connection: duckdb.DuckDBPyConnection) -> pl.DataFrame:
    """Cloud, instance type, GPU, count and vCPUs of all types that map to node classes.

    `stated_gpus` is how many the cloud itself says they have; null where it was not asked.
    """
    return frame_of(
        connection,
        "SELECT i.cloud, i.instance_type, i.gpu, i.gpu_count::INTEGER AS gpu_count, i.vcpus, "
        "arg_max(f.gpu_count, f.observed_at) AS stated_gpus FROM instance_type i "
        "LEFT JOIN instance_fact f USING (cloud, instance_type) GROUP BY ALL ORDER BY ALL",
    )


def hold_prices(connection: duckdb.DuckDBPyConnection) -> str:
    """Prices in force as a temporary table of this connection, for several reads; its name.

    The view goes over the whole history each time.
    """
    connection.execute("CREATE OR REPLACE TEMP TABLE prices_held AS FROM price_now")
    return "prices_held"


def read_market(
    connection: duckdb.DuckDBPyConnection, feeds: Sequence[str], prices: str = "price_now"
) -> list[tuple[str, datetime, MarketRow]]:
    """Prices in force with their source and when it was last seen.

    Of each domain and market the first of `feeds` that has prices there gives them all. `prices`
    is the view of prices in force, or a table with its rows.
    """
    rows = connection.execute(
        "SELECT feed, seen_at, domain, zone, instance_type, node_class, market, "
        f"price_usd_per_hour, nodes FROM {prices} WHERE feed IN (SELECT unnest($1::TEXT[])) "
        "QUALIFY rank() OVER "
        "(PARTITION BY domain, market ORDER BY list_position($1::TEXT[], feed)) = 1 "
        "ORDER BY domain, zone, instance_type, node_class, market, price_usd_per_hour",
        [list(feeds)],
    ).fetchall()
    return [
        (feed, seen_at, MarketRow(domain, zone, name, node, Market(market), price, nodes))
        for feed, seen_at, domain, zone, name, node, market, price, nodes in rows
    ]


def read_feeds(
    connection: duckdb.DuckDBPyConnection, feeds: Sequence[str], prices: str = "price_now"
) -> list[FeedState]:
    """Every source: offers in force, its oldest part, what it says that may not be used.

    `prices` is the view of prices in force, or a table with its rows.
    """
    states = {feed: FeedState(feed, 0, None, {}) for feed in feeds}
    for feed, offers, seen_at in connection.execute(
        f"SELECT feed, count(*), min(seen_at) FROM {prices} "
        "WHERE feed IN (SELECT unnest($1::TEXT[])) GROUP BY feed",
        [list(feeds)],
    ).fetchall():
        states[feed] = replace(states[feed], offers=offers, seen_at=seen_at)
    # Few rows are refused: those of them that nothing newer has put in force again.
    refused = connection.execute(
        "SELECT r.feed, r.why, count(*) FROM ("
        "SELECT feed, domain, zone, instance_type, market, max(observed_at) AS refused_at, "
        "arg_max(rejected_because, observed_at) AS why FROM offer "
        "WHERE rejected_because IS NOT NULL AND feed IN (SELECT unnest($1::TEXT[])) "
        f"GROUP BY feed, domain, zone, instance_type, market) r LEFT JOIN {prices} p "
        "ON p.feed = r.feed AND p.domain = r.domain AND p.zone IS NOT DISTINCT FROM r.zone "
        "AND p.instance_type = r.instance_type AND p.market = r.market "
        "WHERE p.feed IS NULL OR r.refused_at > p.since GROUP BY ALL ORDER BY ALL",
        [list(feeds)],
    ).fetchall()
    for feed, why, count in refused:
        states[feed] = replace(states[feed], rejected={**states[feed].rejected, why: count})
    return list(states.values())


def read_asked(connection: duckdb.DuckDBPyConnection, feed: str, part: str) -> dict[str, datetime]:
    """When a part of a source was last seen, by domain."""
    rows = connection.execute(
        "SELECT domain, max(last_at) FROM market_watch WHERE feed = ? AND part = ? "
        "AND outcome = 'seen' GROUP BY domain",
        [feed, part],
    ).fetchall()
    return dict(rows)


def read_launches(connection: duckdb.DuckDBPyConnection, since: datetime) -> list[LaunchResult]:
    """What became of launches since a time, oldest first."""
    rows = connection.execute(
        "SELECT lease_id, happened_at, domain, zone, instance_type, market, outcome, detail "
        "FROM launch_result WHERE happened_at >= ? ORDER BY happened_at, lease_id",
        [since],
    ).fetchall()
    return [
        LaunchResult(key, at, domain, zone, kind, Market(market), LaunchOutcome(outcome), detail)
        for key, at, domain, zone, kind, market, outcome, detail in rows
    ]


def read_recorded(connection: duckdb.DuckDBPyConnection) -> set[tuple[str, str]]:
    """(lease, outcome) of every launch that is recorded."""
    return set(connection.execute("SELECT lease_id, outcome FROM launch_result").fetchall())


def read_scores(
    connection: duckdb.DuckDBPyConnection, feeds: Sequence[str], now: datetime, fresh: timedelta
) -> dict[tuple[str, str], PlacementScore]:
    """The newest placement scores by (domain, instance type), of parts seen lately."""
    rows = connection.execute(
        "SELECT s.domain, s.instance_type, arg_max(s.score, s.observed_at), "
        "arg_max(s.nodes, s.observed_at), arg_max(s.asked_for, s.observed_at) "
        "FROM placement_score s JOIN market_watch w ON w.feed = s.feed AND w.domain = s.domain "
        "AND w.part = 'scores' AND w.outcome = 'seen' AND w.last_at >= $2 "
        "WHERE s.feed IN (SELECT unnest($1::TEXT[])) GROUP BY s.domain, s.instance_type",
        [list(feeds), now - fresh],
    ).fetchall()
    return {
        (domain, kind): PlacementScore(score, nodes, tuple(asked.split()))
        for domain, kind, score, nodes, asked in rows
    }


def read_quotas(connection: duckdb.DuckDBPyConnection, feeds: Sequence[str]) -> list[QuotaState]:
    """The newest quotas; they outlive a failed refresh, since they rarely change."""
    rows = connection.execute(
        "SELECT domain, family, instance_types, market, arg_max(limit_vcpus, observed_at), "
        "arg_max(used_vcpus, observed_at) FROM quota WHERE feed IN (SELECT unnest($1::TEXT[])) "
        "GROUP BY domain, family, instance_types, market ORDER BY ALL",
        [list(feeds)],
    ).fetchall()
    return [
        QuotaState(domain, family, kinds, Market(market), limit, used)
        for domain, family, kinds, market, limit, used in rows
    ]

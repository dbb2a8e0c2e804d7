"""What people ask of the market: prices with filters, their changes, gaps, failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import polars as pl

from catalog.market.reads import frame_of
from catalog.market.schema import IS_ASIDE


@dataclass(frozen=True, slots=True)
class Filter:
    """Which offers; None is all. `domain` and `instance_type` are shell patterns."""

    gpu: str | None = None
    domain: str | None = None
    instance_type: str | None = None
    market: str | None = None
    feed: str | None = None

    @property
    def values(self) -> list[str | None]:
        return [self.gpu, self.domain, self.instance_type, self.market, self.feed]


MATCHES = (
    "($1 IS NULL OR gpu = $1) AND ($2 IS NULL OR domain GLOB $2) "
    "AND ($3 IS NULL OR instance_type GLOB $3) AND ($4 IS NULL OR market = $4) "
    "AND ($5 IS NULL OR feed = $5)"
)


def read_now(
    connection: duckdb.DuckDBPyConnection, wanted: Filter, prices: str = "price_now"
) -> list[dict[str, Any]]:
    """Prices in force, the cheapest GPU first.

    `prices` is the view of prices in force, or a table with its rows.
    Where no source is named: of each domain and market those of the source seen last.
    """
    return _rows(
        connection,
        "SELECT feed, domain, zone, instance_type, node_class, market, price_usd_per_hour, "
        "price_usd_per_hour / gpu_count AS usd_per_gpu_hour, since, seen_at, nodes, vcpus, "
        f"gpu_count FROM {prices} WHERE {MATCHES} QUALIFY $5 IS NOT NULL "
        "OR rank() OVER (PARTITION BY domain, market ORDER BY seen_at DESC) = 1 "
        "ORDER BY usd_per_gpu_hour, domain, zone, instance_type, market, feed",
        wanted.values,
    )


def read_changes(
    connection: duckdb.DuckDBPyConnection, wanted: Filter, hours: float
) -> pl.DataFrame:
    """Price changes of the last hours, the newest first."""
    return frame_of(
        connection,
        "SELECT c.observed_at, c.feed, c.domain, c.zone, c.instance_type, c.market, "
        "c.before_usd_per_hour, c.price_usd_per_hour, c.change FROM price_change c "
        "JOIN (SELECT DISTINCT instance_type, gpu FROM instance_type) USING (instance_type) "
        f"WHERE {MATCHES} AND c.observed_at >= now() - to_seconds(3600 * $6) "
        "ORDER BY c.observed_at DESC, c.domain, c.zone, c.instance_type, c.market",
        [*wanted.values, hours],
    )


def read_lines(connection: duckdb.DuckDBPyConnection, wanted: Filter, hours: float) -> pl.DataFrame:
    """Rows that count over the last hours, and before them the price that held then.

    `price` is in USD per GPU and hour, null from where an offer was no longer listed, or refused.
    """
    return frame_of(
        connection,
        "WITH rows AS ("
        "SELECT o.feed, o.domain, o.zone, o.instance_type, o.market, o.observed_at, "
        "CASE WHEN o.listed AND o.rejected_because IS NULL "
        "THEN o.price_usd_per_hour / nullif(o.gpu_count, 0) END AS price, "
        "lead(o.observed_at) OVER (PARTITION BY o.feed, o.domain, o.zone, o.instance_type, "
        "o.market ORDER BY o.observed_at) AS until FROM offer o "
        f"WHERE o.rejected_because IS NULL OR NOT ({IS_ASIDE})) "
        "SELECT feed, domain, zone, instance_type, market, observed_at, price, until FROM rows "
        "JOIN (SELECT DISTINCT instance_type, gpu FROM instance_type) USING (instance_type) "
        f"WHERE {MATCHES} AND (until IS NULL OR until >= now() - to_seconds(3600 * $6)) "
        "ORDER BY feed, domain, zone, instance_type, market, observed_at",
        [*wanted.values, hours],
    )


def read_gaps(connection: duckdb.DuckDBPyConnection, hours: float) -> pl.DataFrame:
    """Times in which a part of a source was not seen, the newest first."""
    return frame_of(
        connection,
        "SELECT feed, domain, part, gap_from, gap_to, minutes, why FROM market_gap "
        "WHERE coalesce(gap_to, now()) >= now() - to_seconds(3600 * $1) "
        "ORDER BY gap_from DESC, feed, domain, part",
        [hours],
    )


def read_rejections(connection: duckdb.DuckDBPyConnection, wanted: Filter) -> list[dict[str, Any]]:
    """Offers whose newest row was refused or put aside, with the reason."""
    return _rows(
        connection,
        "SELECT feed, domain, zone, instance_type, market, "
        "arg_max(price_usd_per_hour, observed_at) AS price_usd_per_hour, "
        "max(observed_at) AS observed_at, "
        "arg_max(coalesce(rejected_because, ''), observed_at) AS why FROM offer "
        f"WHERE {MATCHES} GROUP BY feed, domain, zone, instance_type, market HAVING why <> '' "
        "ORDER BY why, domain, zone, instance_type, market",
        wanted.values,
    )


def read_failures(connection: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """Parts of sources that did not answer the last time, with why."""
    return _rows(
        connection,
        "SELECT feed, domain, part, detail, last_at FROM market_watch "
        "QUALIFY row_number() OVER (PARTITION BY feed, domain, part "
        "ORDER BY last_at DESC, first_at DESC) = 1 AND outcome = 'failed' ORDER BY ALL",
    )


def _rows(
    connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[object] = ()
) -> list[dict[str, Any]]:
    """Rows by column name; a frame would load NumPy and PyArrow, which takes longer than this."""
    found = connection.execute(sql, list(parameters))
    names = [column[0] for column in found.description or []]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

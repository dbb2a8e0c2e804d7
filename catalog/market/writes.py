"""Take in what a source answered: one transaction, and only what is new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta

import duckdb
import polars as pl

from catalog.market.changes import new_rows, offered
from catalog.market.pull import PRICED, Landed, Limits, Part, Pull
from catalog.market.reads import read_known_types, read_stored
from catalog.market.schema import GAP_MINUTES
from planner.availability import LaunchResult

COLUMNS = (
    "observed_at, source, cloud, domain, zone, instance_type, gpu, gpu_count, market, "
    "price_usd_per_hour, rejected_because, feed, listed, nodes, pulled_at"
)
FEWEST_TO_MISS = 4  # offers of a domain and market; an empty answer in place of fewer is believed


def append_pull(connection: duckdb.DuckDBPyConnection, pull: Pull, limits: Limits) -> Landed:
    """Append a pull's price changes and evidence inside the caller's transaction.

    What is stored is compared inside the same transaction: two refreshes side by side, or one
    after a kill, leave no row twice and none out.
    """
    _append_evidence(connection, pull)
    new_types = _register_types(connection, pull)
    domains = sorted({part.domain for part in pull.parts})
    stored = read_stored(connection, pull.feed, domains)
    parts = [_believed(part, pull.prices, stored) for part in pull.parts]
    types = read_known_types(connection)
    rows, rejected = new_rows(
        pull.prices, stored, types.drop("gpu", "vcpus"), parts, pull.at, limits
    )  # fmt: skip
    _append_prices(
        connection, rows, pl.concat([types.drop("stated_gpus"), _stated(pull.types)]), pull
    )
    for part in parts:
        _watch(connection, pull.feed, part, pull.at)
    accepted = rows.filter(pl.col("rejected_because").is_null())
    return Landed(
        feed=pull.feed,
        prices=pull.prices.height,
        changed=accepted.filter("listed").height,
        withdrawn=accepted.filter(~pl.col("listed")).height,
        rejected=rejected,
        parts=parts,
        new_types=new_types,
    )


def watch_failure(connection: duckdb.DuckDBPyConnection, feed: str, why: str, at: datetime) -> None:
    """A source that did not answer at all: every part that it ever had has a failure."""
    known = connection.execute(
        "SELECT DISTINCT domain, part FROM market_watch WHERE feed = ? ORDER BY ALL", [feed]
    ).fetchall()
    for domain, part in known or [("*", "all")]:
        _extend(connection, (feed, domain, part, "failed", why), at)


def record_launches(connection: duckdb.DuckDBPyConnection, results: Iterable[LaunchResult]) -> int:
    """Keep what became of launches; each lease has an outcome once. How many were new."""
    new = 0
    for one in results:
        new += len(
            connection.execute(
                "INSERT OR IGNORE INTO launch_result (happened_at, lease_id, domain, zone, "
                "instance_type, market, outcome, detail) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
                "RETURNING lease_id",
                [one.at, one.lease_id, one.domain, one.zone, one.instance_type, one.market.value,
                 one.outcome.value, one.detail],
            ).fetchall()
        )  # fmt: skip
    return new


def _believed(part: Part, prices: pl.DataFrame, stored: pl.DataFrame) -> Part:
    """A part that lists nothing any more, where there was much, is a failure and no market."""
    if not part.seen or part.sure or part.of not in PRICED:
        return part
    mine = (pl.col("domain") == part.domain) & (pl.col("market") == part.of.value)
    before = offered(stored.with_columns(pl.col("zone").fill_null(""))).filter(mine).height
    if before >= FEWEST_TO_MISS and prices.filter(mine).is_empty():
        return replace(part, failed=f"an empty answer where there were {before} offers")
    return part


def _append_prices(
    connection: duckdb.DuckDBPyConnection, rows: pl.DataFrame, types: pl.DataFrame, pull: Pull
) -> None:
    if rows.is_empty():
        return
    known = types.unique(["cloud", "instance_type"], keep="first", maintain_order=True)
    frame = rows.join(known, on=["cloud", "instance_type"], how="left").with_columns(
        pl.col("gpu").fill_null(""),
        pl.col("gpu_count").fill_null(0),
        pl.col("price_usd_per_hour").fill_null(0.0),
        feed=pl.lit(pull.feed),
        pulled_at=pl.lit(pull.at),
    )
    connection.register("pulled", frame.to_arrow())
    connection.execute(f"INSERT INTO offer ({COLUMNS}) SELECT {COLUMNS} FROM pulled")
    connection.unregister("pulled")


def _register_types(connection: duckdb.DuckDBPyConnection, pull: Pull) -> list[str]:
    """Map types that a source describes to node classes that are known, and keep them.

    Links are those of the class; its network is the slowest that its cloud, or any, is known to
    have, so that the class is planned with as before.
    """
    connection.register("stated", _stated(pull.types).to_arrow())
    added = connection.execute(
        """
        INSERT INTO instance_type (cloud, instance_type, node_class, gpu, gpu_count, vcpus, link,
            network_peak_gbit_per_s, network_baseline_gbit_per_s, source)
        SELECT s.cloud, s.instance_type, i.node_class, any_value(i.gpu), any_value(i.gpu_count),
               any_value(s.vcpus), any_value(i.link),
               coalesce(min(i.network_peak_gbit_per_s) FILTER (WHERE i.cloud = s.cloud),
                        min(i.network_peak_gbit_per_s)),
               coalesce(min(i.network_baseline_gbit_per_s) FILTER (WHERE i.cloud = s.cloud),
                        min(i.network_baseline_gbit_per_s)),
               ? || ': GPU and count as listed there; link and network as of ' || i.node_class
        FROM stated s JOIN instance_type i ON i.gpu = s.gpu AND i.gpu_count = s.gpu_count
        WHERE s.vcpus > 0 AND NOT EXISTS (
            SELECT 1 FROM instance_type k
            WHERE k.cloud = s.cloud AND k.instance_type = s.instance_type)
        GROUP BY s.cloud, s.instance_type, i.node_class
        RETURNING instance_type
        """,
        [pull.feed],
    ).fetchall()
    connection.unregister("stated")
    return sorted(name for (name,) in added)


def _stated(types: pl.DataFrame) -> pl.DataFrame:
    return types.unique(["cloud", "instance_type"], keep="first", maintain_order=True)


def _watch(connection: duckdb.DuckDBPyConnection, feed: str, part: Part, at: datetime) -> None:
    outcome = "seen" if part.seen else "failed"
    _extend(connection, (feed, part.domain, part.of.value, outcome, part.failed), at)


def _extend(
    connection: duckdb.DuckDBPyConnection, row: tuple[str, str, str, str, str], at: datetime
) -> None:
    """One row per stretch of time with the same outcome, not one per pull."""
    newest = connection.execute(
        "SELECT outcome, detail, first_at, last_at FROM market_watch "
        "WHERE feed = ? AND domain = ? AND part = ? ORDER BY last_at DESC, first_at DESC LIMIT 1",
        row[:3],
    ).fetchall()
    if newest:
        outcome, detail, first_at, last_at = newest[0]
        goes_on = at - last_at <= timedelta(minutes=GAP_MINUTES)
        if at <= last_at and outcome == "seen":
            return  # a slower refresh that began before one that has landed
        if (outcome, detail) == row[3:] and goes_on:
            connection.execute(
                "UPDATE market_watch SET last_at = greatest(last_at, ?), pulls = pulls + 1 "
                "WHERE feed = ? AND domain = ? AND part = ? AND outcome = ? AND first_at = ?",
                [at, *row[:4], first_at],
            )
            return
    connection.execute(
        "INSERT INTO market_watch (feed, domain, part, outcome, detail, first_at, last_at, pulls) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, 1)",
        [*row, at, at],
    )


def _append_evidence(connection: duckdb.DuckDBPyConnection, pull: Pull) -> None:
    """Scores and quotas that differ from the last ones; facts and offerings as of now."""
    _append_changes(
        connection,
        "placement_score",
        ("feed", "domain", "instance_type"),
        [
            {"observed_at": pull.at, "feed": pull.feed, "domain": one.domain,
             "instance_type": kind, "asked_for": " ".join(one.instance_types), "nodes": one.nodes,
             "score": one.score}
            for one in pull.scores
            for kind in one.concerns
        ],
    )  # fmt: skip
    _append_changes(
        connection,
        "quota",
        ("feed", "domain", "family", "instance_types", "market"),
        [{"observed_at": pull.at, "feed": pull.feed, **asdict(one)} for one in pull.quotas],
    )
    for fact in pull.facts:
        row = {"observed_at": pull.at, "feed": pull.feed, **asdict(fact)}
        marks = ", ".join("?" * len(row))
        connection.execute(
            f"INSERT OR REPLACE INTO instance_fact ({', '.join(row)}) VALUES ({marks})",
            list(row.values()),
        )
    if pull.offerings:
        frame = pl.DataFrame(
            pull.offerings, schema=["domain", "zone", "instance_type"], orient="row"
        )
        connection.register("offerings", frame.to_arrow())
        connection.execute(
            "INSERT INTO zone_offering SELECT ?, domain, zone, instance_type, ?, ? FROM offerings "
            "ON CONFLICT DO UPDATE SET last_at = excluded.last_at",
            [pull.feed, pull.at, pull.at],
        )
        connection.unregister("offerings")


def _append_changes(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    key: tuple[str, ...],
    rows: Sequence[Mapping[str, object]],
) -> None:
    """Append the rows whose values differ from the newest of their key."""
    if not rows:
        return
    frame = pl.DataFrame(rows, infer_schema_length=None)
    values = [name for name in frame.columns if name not in {*key, "observed_at"}]
    connection.register("seen_rows", frame.to_arrow())
    on = " AND ".join(f"n.{name} = s.{name}" for name in key)
    same = " AND ".join(f"n.{name} = s.{name}" for name in values)
    newest = ", ".join(f"arg_max({name}, observed_at) AS {name}" for name in values)
    columns = ", ".join(frame.columns)
    connection.execute(
        f"INSERT INTO {table} ({columns}) SELECT {columns} FROM seen_rows s WHERE NOT EXISTS "
        f"(SELECT 1 FROM (SELECT {', '.join(key)}, {newest} FROM {table} GROUP BY ALL) n "
        f"WHERE {on} AND {same})"
    )
    connection.unregister("seen_rows")

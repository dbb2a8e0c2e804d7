"""Demand as gateways saw it: files of the inbox, each taken in once, and rates by minute."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

import duckdb
import polars as pl

COUNTS = ("requests", "turned_away", "measured", "prompt_tokens", "output_tokens")
P95 = ("prompt_tokens_p95", "output_tokens_p95")
COLUMNS = ("minute", "model", "gateway", *COUNTS, *P95)


class ObservedDemandError(ValueError):
    """Rows that are not what a gateway writes."""


def checked_rows(rows: pl.DataFrame) -> pl.DataFrame:
    """The columns of a gateway's file, in order.

    Raises ObservedDemandError: a column is missing or of another kind, or a value is none.
    """
    missing = [name for name in COLUMNS if name not in rows.columns]
    if missing:
        raise ObservedDemandError(f"no column {', '.join(missing)}")
    kinds = rows.schema
    wrong = [name for name in ("model", "gateway") if kinds[name] != pl.String]
    wrong += [name for name in COUNTS if kinds[name] != pl.Int64]
    wrong += [name for name in P95 if kinds[name] != pl.Float64]
    if not (isinstance(kinds["minute"], pl.Datetime) and kinds["minute"].time_zone == "UTC"):
        wrong.append("minute")
    if wrong:
        raise ObservedDemandError(f"another kind of values in {', '.join(wrong)}")
    needed = rows.select("minute", "model", "gateway", *COUNTS)
    if sum(needed.null_count().row(0)):
        raise ObservedDemandError("values are missing")
    if any(least < 0 for least in rows.select(COUNTS).min().row(0) if least is not None):
        raise ObservedDemandError("a count is negative")
    if (rows["minute"].dt.epoch("s") % 60 != 0).any():
        raise ObservedDemandError("a minute that does not begin one")
    return rows.select(COLUMNS)


def read_loaded(connection: duckdb.DuckDBPyConnection, names: Collection[str]) -> set[str]:
    """Which of these files are in."""
    rows = connection.execute(
        "SELECT name FROM inbox_file WHERE name IN (SELECT unnest(?))", [list(names)]
    ).fetchall()
    return {row[0] for row in rows}


def append_observed(
    connection: duckdb.DuckDBPyConnection, name: str, rows: pl.DataFrame, now: datetime
) -> None:
    """One file's rows, inside the caller's transaction; a file that is in is refused by its key."""
    connection.execute("INSERT INTO inbox_file VALUES (?, ?, ?)", [name, now, rows.height])
    connection.register("observed_rows", rows)
    connection.execute(
        f"INSERT INTO observed_demand ({', '.join(COLUMNS)}, source) "
        f"SELECT {', '.join(COLUMNS)}, ? FROM observed_rows",
        [f"gateway, {name}"],
    )
    connection.unregister("observed_rows")


def read_observed(
    connection: duckdb.DuckDBPyConnection, since: datetime
) -> dict[str, tuple[list[int], list[float]]]:
    """By model: minutes since 1970 that a gateway saw, oldest first, and their requests/s."""
    rows = connection.execute(
        "SELECT model, list(number ORDER BY number), list(requests / 60.0 ORDER BY number) "
        "FROM (SELECT model, epoch(minute)::BIGINT // 60 AS number, sum(requests) AS requests "
        "FROM observed_demand WHERE minute >= ? GROUP BY ALL) GROUP BY model ORDER BY model",
        [since],
    ).fetchall()
    return {model: (minutes, rates) for model, minutes, rates in rows}

"""What gateways saw: files of the inbox, each taken in once; rates by minute, and lengths."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

import duckdb
import polars as pl


class ObservedError(ValueError):
    """Rows that are not what a gateway writes."""


@dataclass(frozen=True)
class Kind:
    """One kind of rows that gateways write: a table's columns after `minute`."""

    table: str
    texts: tuple[str, ...]
    counts: tuple[str, ...]
    amounts: tuple[str, ...] = ()
    perhaps: tuple[str, ...] = ()  # numbers that may be missing
    later: tuple[str, ...] = ()  # counts that gateways of an earlier Coral do not write: zero

    @property
    def columns(self) -> tuple[str, ...]:
        return ("minute", *self.texts, *self.amounts, *self.counts, *self.perhaps, *self.later)


DEMAND = Kind(
    "observed_demand",
    ("model", "gateway"),
    ("requests", "turned_away", "measured", "prompt_tokens", "output_tokens"),
    perhaps=("prompt_tokens_p95", "output_tokens_p95"),
    later=("judged", "ttft_met", "tpot_met", "both_met"),
)
REPLICAS = Kind(
    "observed_replica",
    ("replica", "template", "model", "phase", "gateway"),
    ("measured", "prompt_tokens", "output_tokens", "other_tokens", "decode_tokens"),
    ("in_flight_s", "decoding_s", "decoding_sq_s", "decode_s"),
)


def kind_of(name: str) -> Kind:
    """What a file of the inbox holds, by its name."""
    return REPLICAS if name.startswith("replicas-") else DEMAND


def checked_rows(rows: pl.DataFrame, kind: Kind) -> pl.DataFrame:
    """The columns of a gateway's file, in order.

    Raises ObservedError: a column is missing or of another kind, or a value is none.
    """
    rows = rows.with_columns(
        pl.lit(0, pl.Int64).alias(name) for name in kind.later if name not in rows.columns
    )
    counts = (*kind.counts, *kind.later)
    missing = [name for name in kind.columns if name not in rows.columns]
    if missing:
        raise ObservedError(f"no column {', '.join(missing)}")
    found = rows.schema
    wrong = [name for name in kind.texts if found[name] != pl.String]
    wrong += [name for name in counts if found[name] != pl.Int64]
    wrong += [name for name in (*kind.amounts, *kind.perhaps) if found[name] != pl.Float64]
    if not (isinstance(found["minute"], pl.Datetime) and found["minute"].time_zone == "UTC"):
        wrong.append("minute")
    if wrong:
        raise ObservedError(f"another kind of values in {', '.join(wrong)}")
    needed = rows.select("minute", *kind.texts, *counts, *kind.amounts)
    if sum(needed.null_count().row(0)):
        raise ObservedError("values are missing")
    if any(least < 0 for least in rows.select(counts).min().row(0) if least is not None):
        raise ObservedError("a count is negative")
    for name in kind.amounts:
        if not (rows[name].is_finite() & (rows[name] >= 0.0)).all():
            raise ObservedError(f"{name} is no amount")
    if (rows["minute"].dt.epoch("s") % 60 != 0).any():
        raise ObservedError("a minute that does not begin one")
    return rows.select(kind.columns)


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
    kind = kind_of(name)
    connection.execute("INSERT INTO inbox_file VALUES (?, ?, ?)", [name, now, rows.height])
    connection.register("observed_rows", rows)
    connection.execute(
        f"INSERT INTO {kind.table} ({', '.join(kind.columns)}, source) "
        f"SELECT {', '.join(kind.columns)}, ? FROM observed_rows",
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


@dataclass(frozen=True, slots=True)
class SeenLengths:
    """Of one model's requests that ended."""

    requests: int
    prompt_tokens: float  # mean
    output_tokens: float


def read_lengths_seen(
    connection: duckdb.DuckDBPyConnection, since: datetime
) -> dict[str, SeenLengths]:
    """By model, of requests whose tokens are known."""
    rows = connection.execute(
        "SELECT model, sum(measured)::BIGINT, sum(prompt_tokens) / sum(measured), "
        "sum(output_tokens) / sum(measured) FROM observed_demand WHERE minute >= ? "
        "GROUP BY model HAVING sum(measured) > 0 ORDER BY model",
        [since],
    ).fetchall()
    return {model: SeenLengths(*values) for model, *values in rows}

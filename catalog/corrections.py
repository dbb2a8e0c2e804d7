"""What replicas did by the minute, and the corrections that followed from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime

import duckdb
import polars as pl

from planner.types import Phase


@dataclass(frozen=True, slots=True)
class CorrectionRow:
    """What serving taught of one template; the columns of table `correction`."""

    corrected_at: datetime
    scenario: str
    template_id: str
    workload: str
    phase: Phase
    factor: float  # of its throughput; 1: the evidence is gone
    speed: float  # what was seen over what the profile says
    kind: str  # 'throughput' or 'tpot'; 'none' where there is no evidence
    minutes: int
    replicas: int
    among: float  # requests that one was served among
    observed: float  # tokens/s (prefill: prompts/s) or ms
    predicted: float
    profile_row: str
    first_minute: datetime  # of the evidence, in `replica_by_minute`
    last_minute: datetime


def read_minutes(
    connection: duckdb.DuckDBPyConnection, since: datetime, until: datetime
) -> pl.DataFrame:
    """Minutes of all replicas, those of several gateways added up."""
    found: pl.DataFrame = connection.sql(
        "SELECT template, replica, minute, in_flight, decoding, among, tpot_ms, timed_tokens, "
        "requests_per_s, output_tokens_per_s, measured, prompt_tokens, output_tokens "
        "FROM replica_by_minute WHERE minute >= ? AND minute < ? "
        "ORDER BY template, minute, replica",
        params=[since, until],
    ).pl()
    return found


def write_corrections(connection: duckdb.DuckDBPyConnection, rows: Sequence[CorrectionRow]) -> None:
    """Append them."""
    names = [field.name for field in fields(CorrectionRow)]
    marks = ", ".join("?" * len(names))
    for row in rows:
        connection.execute(
            f"INSERT INTO correction ({', '.join(names)}) VALUES ({marks})",
            list(asdict(row).values()),
        )


def read_corrections(
    connection: duckdb.DuckDBPyConnection, scenario: str, since: datetime | None = None
) -> dict[str, CorrectionRow]:
    """The latest of every template, or of those whose evidence reaches into the time since then."""
    names = [field.name for field in fields(CorrectionRow)]
    rows = connection.execute(
        f"SELECT {', '.join(names)} FROM correction_now WHERE scenario = $1 "
        "AND ($2 IS NULL OR last_minute >= $2) ORDER BY template_id",
        [scenario, since],
    ).fetchall()
    found = [dict(zip(names, row, strict=True)) for row in rows]
    return {
        row["template_id"]: CorrectionRow(**{**row, "phase": Phase(row["phase"])}) for row in found
    }

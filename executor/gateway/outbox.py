"""Rows of minutes that are over, on their way into Parquet files of the home's inbox."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MINUTE_S = 60
MOST_ROWS_KEPT = 100_000  # while the inbox can't be written
MINUTE = pa.timestamp("s", tz="UTC")

Row = Mapping[str, object]


class Outbox:
    """One kind of rows of one gateway; a file is there whole or not at all."""

    def __init__(
        self, inbox: Path, kind: str, schema: pa.Schema, clock: Callable[[], float] = time.time
    ) -> None:
        self.inbox, self.kind, self.schema, self.clock = inbox, kind, schema, clock
        self._rows: list[Row] = []
        self._writing = threading.Lock()
        self._again_at = 0.0  # after the inbox could not be written

    def add(self, rows: Iterable[Row]) -> None:
        """To be written."""
        self._rows += rows

    def is_due(self, *, at_end: bool = False) -> bool:
        """Whether there is something to write, and it was not tried in vain a moment ago."""
        return bool(self._rows) and (at_end or self.clock() >= self._again_at)

    def write(self) -> None:
        """All rows as one new file; in a thread of its own.

        Raises OSError: it can't be written; the rows are kept for the next time.
        """
        with self._writing:
            del self._rows[:-MOST_ROWS_KEPT]
            rows = list(self._rows)
            if not rows:
                return
            self._again_at = self.clock() + MINUTE_S
            self.inbox.mkdir(parents=True, exist_ok=True)
            name = f"{self.kind}-{int(self.clock())}-{uuid.uuid4().hex}.parquet"
            draft = self.inbox / f"{name}.draft"
            pq.write_table(pa.Table.from_pylist(rows, self.schema), draft)
            draft.replace(self.inbox / name)
            self._again_at = 0.0
            del self._rows[: len(rows)]


def minute_of(clock: Callable[[], float]) -> int:
    """Whole minutes since 1970."""
    return int(clock() // MINUTE_S)


def start_of(minute: int) -> datetime:
    """When it began."""
    return datetime.fromtimestamp(minute * MINUTE_S, UTC)

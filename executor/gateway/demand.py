"""Demand per model and minute, as Parquet files in the home's inbox; `coral operate` loads them.

A row counts the requests that came in a minute, whether they could be served or not, and the tokens
of those that ended in it. A model without requests has a row of zeros, so that a minute without a
row is one that no gateway saw.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

MINUTE_S = 60
MOST_QUIET_MINUTES = 5  # in a row: who slept longer does not know that nothing came
MOST_ROWS_KEPT = 100_000  # while the inbox can't be written


@dataclass
class Minute:
    """What one model saw in one minute."""

    requests: int = 0
    turned_away: int = 0  # of these, for lack of room or replicas
    prompts: list[int] = field(default_factory=list)  # tokens of requests that ended
    outputs: list[int] = field(default_factory=list)


class DemandBook:
    """Counts of this gateway, written out when their minute is over."""

    def __init__(self, inbox: Path, clock: Callable[[], float] = time.time) -> None:
        self.inbox, self.clock = inbox, clock
        self.gateway = uuid.uuid4().hex  # minutes of several gateways add up
        self._open: dict[tuple[int, str], Minute] = defaultdict(Minute)
        self._next = self._minute()  # the first that is not closed
        self._closed: list[tuple[int, str, Minute]] = []
        self._writing = threading.Lock()
        self._again_at = 0.0  # after the inbox could not be written

    def came(self, model: str) -> None:
        """A request that is well-formed, allowed, and names a model that is served."""
        self._open[self._minute(), model].requests += 1

    def turned_away(self, model: str) -> None:
        """It found no room or no replica."""
        self._open[self._minute(), model].turned_away += 1

    def ended(self, model: str, prompt_tokens: int, output_tokens: int) -> None:
        """An answer that says how long it was."""
        minute = self._open[self._minute(), model]
        minute.prompts.append(prompt_tokens)
        minute.outputs.append(output_tokens)

    def close(self, models: Collection[str], *, at_end: bool = False) -> bool:
        """Close minutes that are over, of all models served; whether there is something to write.

        At the end also the one that is not over.
        """
        now = self._minute()
        quiet = range(max(self._next, now - MOST_QUIET_MINUTES), now)
        wanted = {(minute, model) for minute in quiet for model in models}
        wanted |= {key for key in self._open if at_end or key[0] < now}
        self._closed += [(*key, self._open.pop(key, Minute())) for key in sorted(wanted)]
        self._next = now
        return bool(self._closed) and (at_end or self.clock() >= self._again_at)

    def write(self) -> None:
        """All that is closed as one new file, whole or not at all; in a thread of its own.

        Raises OSError: it can't be written; the rows are kept for the next time.
        """
        with self._writing:
            del self._closed[:-MOST_ROWS_KEPT]
            rows = list(self._closed)
            if not rows:
                return
            self._again_at = self.clock() + MINUTE_S
            self._write(rows)
            self._again_at = 0.0
            del self._closed[: len(rows)]

    def _write(self, rows: Sequence[tuple[int, str, Minute]]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.inbox.mkdir(parents=True, exist_ok=True)
        name = f"demand-{rows[-1][0] * MINUTE_S}-{uuid.uuid4().hex}.parquet"
        draft = self.inbox / f"{name}.draft"
        pq.write_table(pa.Table.from_pylist([self._row(*row) for row in rows], _schema()), draft)
        draft.replace(self.inbox / name)

    def _row(self, minute: int, model: str, seen: Minute) -> dict[str, object]:
        return {
            "minute": datetime.fromtimestamp(minute * MINUTE_S, UTC),
            "model": model,
            "gateway": self.gateway,
            "requests": seen.requests,
            "turned_away": seen.turned_away,
            "measured": len(seen.prompts),
            "prompt_tokens": sum(seen.prompts),
            "output_tokens": sum(seen.outputs),
            "prompt_tokens_p95": p95(seen.prompts),
            "output_tokens_p95": p95(seen.outputs),
        }

    def _minute(self) -> int:
        return int(self.clock() // MINUTE_S)


def p95(values: Sequence[float]) -> float | None:
    """The smallest that 95% do not exceed."""
    return float(sorted(values)[-(-95 * len(values) // 100) - 1]) if values else None


def _schema() -> object:
    import pyarrow as pa

    counts = ("requests", "turned_away", "measured", "prompt_tokens", "output_tokens")
    return pa.schema(
        [
            ("minute", pa.timestamp("s", tz="UTC")),
            ("model", pa.string()),
            ("gateway", pa.string()),
            *((name, pa.int64()) for name in counts),
            ("prompt_tokens_p95", pa.float64()),
            ("output_tokens_p95", pa.float64()),
        ]
    )

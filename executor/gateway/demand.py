"""Demand per model and minute, as Parquet files in the home's inbox; `coral operate` loads them.

A row counts the requests that came in a minute, whether they could be served or not, and the tokens
of those that ended in it, and how many streams that ended were judged by the model's objectives and
met them. A model without requests has a row of zeros, so that a minute without a
row is one that no gateway saw.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from executor.gateway.outbox import MINUTE, Outbox, Row, minute_of, start_of

MOST_QUIET_MINUTES = 5  # in a row: who slept longer does not know that nothing came
MET = ("judged", "ttft_met", "tpot_met", "both_met")
COUNTS = ("requests", "turned_away", "measured", "prompt_tokens", "output_tokens", *MET)
SCHEMA = pa.schema(
    [
        ("minute", MINUTE),
        ("model", pa.string()),
        ("gateway", pa.string()),
        *((name, pa.int64()) for name in COUNTS),
        ("prompt_tokens_p95", pa.float64()),
        ("output_tokens_p95", pa.float64()),
    ]
)


@dataclass
class Minute:
    """What one model saw in one minute."""

    requests: int = 0
    turned_away: int = 0  # of these, for lack of room or replicas
    prompts: list[int] = field(default_factory=list)  # tokens of requests that ended
    outputs: list[int] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)  # of MET


class DemandBook:
    """Counts of this gateway, written out when their minute is over."""

    def __init__(self, inbox: Path, clock: Callable[[], float] = time.time) -> None:
        self.outbox, self.clock = Outbox(inbox, "demand", SCHEMA, clock), clock
        self.gateway = uuid.uuid4().hex  # minutes of several gateways add up
        self._open: dict[tuple[int, str], Minute] = defaultdict(Minute)
        self._next = self._minute()  # the first that is not closed

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

    def judged(self, model: str, *, ttft_met: bool, tpot_met: bool) -> None:
        """A stream that ended and has objectives."""
        self._open[self._minute(), model].met.update(
            judged=1, ttft_met=ttft_met, tpot_met=tpot_met, both_met=ttft_met and tpot_met
        )

    def close(self, models: Collection[str], *, at_end: bool = False) -> bool:
        """Close minutes that are over, of all models served; whether there is something to write.

        At the end also the one that is not over.
        """
        now = self._minute()
        quiet = range(max(self._next, now - MOST_QUIET_MINUTES), now)
        wanted = {(minute, model) for minute in quiet for model in models}
        wanted |= {key for key in self._open if at_end or key[0] < now}
        self.outbox.add([self._row(*key, self._open.pop(key, Minute())) for key in sorted(wanted)])
        self._next = now
        return self.outbox.is_due(at_end=at_end)

    def write(self) -> None:
        """All that is closed, as `Outbox.write`."""
        self.outbox.write()

    def _row(self, minute: int, model: str, seen: Minute) -> Row:
        return {
            "minute": start_of(minute),
            "model": model,
            "gateway": self.gateway,
            "requests": seen.requests,
            "turned_away": seen.turned_away,
            "measured": len(seen.prompts),
            "prompt_tokens": sum(seen.prompts),
            "output_tokens": sum(seen.outputs),
            **{name: seen.met[name] for name in MET},
            "prompt_tokens_p95": p95(seen.prompts),
            "output_tokens_p95": p95(seen.outputs),
        }

    def _minute(self) -> int:
        return minute_of(self.clock)


def p95(values: Sequence[float]) -> float | None:
    """The smallest that 95% do not exceed."""
    return float(sorted(values)[-(-95 * len(values) // 100) - 1]) if values else None

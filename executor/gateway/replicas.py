"""What each replica does, by the minute, as Parquet files in the home's inbox.

`coral operate` compares it with what the replica's template promises. Of requests at a replica the
integrals over a minute are kept: how many there are, how many of them decode, and the square of
that, from which the number follows that a request decodes among.
Source: docs/formulation.md, section 12.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from executor.gateway.outbox import MINUTE, MINUTE_S, Outbox, minute_of, start_of
from executor.gateway.usage import is_count
from executor.routes import Route

SECONDS = ("in_flight_s", "decoding_s", "decoding_sq_s", "decode_s")
COUNTS = ("measured", "prompt_tokens", "output_tokens", "other_tokens", "decode_tokens")
SCHEMA = pa.schema(
    [
        ("minute", MINUTE),
        ("replica", pa.string()),
        ("template", pa.string()),
        ("model", pa.string()),
        ("phase", pa.string()),
        ("gateway", pa.string()),
        *((name, pa.float64()) for name in SECONDS),
        *((name, pa.int64()) for name in COUNTS),
    ]
)
MOST_MINUTES = 5  # that one step over the clock may fill: who slept longer knows nothing of them


@dataclass(slots=True)
class Load:
    """One replica in one minute."""

    in_flight_s: float = 0.0  # requests x seconds
    decoding_s: float = 0.0  # of these, with their first token and not their last
    decoding_sq_s: float = 0.0  # the square of their number x seconds
    decode_s: float = 0.0  # from first to last event of the streams that ended
    measured: int = 0  # requests that ended and told their tokens
    prompt_tokens: int = 0  # theirs
    output_tokens: int = 0
    other_tokens: int = 0  # output of streams that ended without a word on it
    decode_tokens: int = 0  # that came after the first in `decode_s`


class Meter:
    """One replica."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.minutes: dict[int, Load] = {}
        self._in_flight = self._decoding = 0
        self._at = clock()  # until when the integrals reach

    def change(self, in_flight: int, decoding: int) -> None:
        """So many more."""
        self.advance()
        self._in_flight += in_flight
        self._decoding += decoding

    def advance(self) -> None:
        """The integrals up to now."""
        now = self.clock()
        begin = max(self._at, now - MOST_MINUTES * MINUTE_S)
        while self._in_flight and begin < now:
            end = min(now, (begin // MINUTE_S + 1) * MINUTE_S)
            load = self.load(begin)
            load.in_flight_s += self._in_flight * (end - begin)
            load.decoding_s += self._decoding * (end - begin)
            load.decoding_sq_s += self._decoding**2 * (end - begin)
            begin = end
        self._at = now

    def load(self, at: float) -> Load:
        """Of the minute at a time."""
        return self.minutes.setdefault(int(at // MINUTE_S), Load())

    @property
    def is_idle(self) -> bool:
        return self._in_flight == 0


class Use:
    """One request on one replica; a whole answer counts as decoding all the time."""

    def __init__(self, meter: Meter, *, stream: bool) -> None:
        self.meter, self._stream = meter, stream
        self._first = self._last = 0.0
        self._events = 0
        self._tokens: tuple[int, int] | None = None
        self._decodes = not stream
        meter.change(1, int(self._decodes))

    def event(self) -> None:
        """An event of a stream, with something in it."""
        self._last = time.monotonic()
        self._events += 1
        if not self._decodes:
            self._first, self._decodes = self._last, True
            self.meter.change(0, 1)

    def told(self, usage: object) -> None:
        """What the engine says of the request's tokens; nothing where none are made."""
        if isinstance(usage, Mapping):
            prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if is_count(prompt) and is_count(output):
                self._tokens = (prompt, output)

    def end(self) -> None:
        """However it ended."""
        self.meter.change(-1, -int(self._decodes))
        load = self.meter.load(self.meter.clock())
        if self._tokens is None:
            load.other_tokens += self._events
            return
        prompt, output = self._tokens
        load.measured += 1
        load.prompt_tokens += prompt
        load.output_tokens += output
        if self._stream and self._events > 1 and output > 1:
            load.decode_s += self._last - self._first
            load.decode_tokens += output - 1


class ReplicaBook:
    """Meters of all replicas that are routed to, and their minutes written out when over."""

    def __init__(self, inbox: Path, gateway: str, clock: Callable[[], float] = time.time) -> None:
        self.outbox = Outbox(inbox, "replicas", SCHEMA, clock)
        self.gateway, self.clock = gateway, clock
        self._meters: dict[str, tuple[Route, Meter]] = {}

    def meter(self, route: Route) -> Meter:
        """Of a route's replica, its engines together."""
        if route.replica_id not in self._meters:
            self._meters[route.replica_id] = (route, Meter(self.clock))
        return self._meters[route.replica_id][1]

    def close(self, *, at_end: bool = False) -> bool:
        """Close minutes that are over; whether there is something to write.

        Only those in which a replica with a template had requests.
        """
        now = minute_of(self.clock)
        for replica, (route, meter) in list(self._meters.items()):
            meter.advance()
            for minute in sorted(m for m in meter.minutes if at_end or m < now):
                load = meter.minutes.pop(minute)
                if route.template_id:
                    self.outbox.add([self._row(minute, route, load)])
            if meter.is_idle and not meter.minutes:
                del self._meters[replica]  # made again with its next request
        return self.outbox.is_due(at_end=at_end)

    def _row(self, minute: int, route: Route, load: Load) -> Mapping[str, object]:
        return {
            "minute": start_of(minute),
            "replica": route.replica_id,
            "template": route.template_id,
            "model": route.model,
            "phase": route.phase.value,
            "gateway": self.gateway,
            **asdict(load),
        }

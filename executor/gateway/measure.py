"""What requests are like, per model: Prometheus metrics, and demand by the minute.

Definitions: docs/metrics.md.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from executor.gateway.demand import DemandBook
from executor.gateway.usage import is_count
from executor.routes import Objective

TTFT_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0)
TPOT_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
ANSWER_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
TURNED_AWAY = frozenset({429, 503})
GONE = 499


class Measures:
    """All that this gateway has seen."""

    def __init__(self, book: DemandBook) -> None:
        self.book, self.registry = book, CollectorRegistry()
        self.objectives: Mapping[str, Objective] = {}  # by model

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"coral_gateway_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"coral_gateway_{name}", text, ["model"], buckets=buckets, registry=self.registry
            )

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"coral_gateway_{name}", text, ["model"], registry=self.registry)

        self.requests = counter("requests", "Requests that ended.", "model", "outcome")
        self.denied = counter("denied", "Requests refused before their model.", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.", "model")
        self.output_tokens = counter("output_tokens", "Tokens of answers.", "model")
        self.judged = counter("slo_judged", "Streams with an objective.", "model")
        self.met = counter("slo_met", "Of these, that met it.", "model", "objective")
        self.ttft = histogram("ttft_seconds", "Arrival to first event.", TTFT_S)
        self.tpot = histogram("tpot_seconds", "Per output token after the first.", TPOT_S)
        self.answer = histogram("answer_seconds", "Arrival to end, if answered.", ANSWER_S)
        self.in_flight = gauge("in_flight", "Requests under way.")
        self.waiting = gauge("waiting", "Of these, without a first event or answer.")

    def exposition(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)

    def visit(self, model: str) -> Visit:
        """A request that has come."""
        return Visit(self, model)


class Visit:
    """One request, from when its body is read until it ends."""

    def __init__(self, measures: Measures, model: str) -> None:
        self.measures, self.model = measures, model
        self._began = time.monotonic()
        self._first: float | None = None
        self._last = self._began
        self._events = 0
        self._tokens: tuple[int, int] | None = None
        self._ended = False
        measures.book.came(model)
        measures.in_flight.labels(model).inc()
        measures.waiting.labels(model).inc()

    def event(self) -> None:
        """An event of a stream, with something in it, is passed on."""
        self._last = time.monotonic()
        self._events += 1
        if self._first is None:
            self._first = self._last
            self.measures.waiting.labels(self.model).dec()

    def used(self, usage: object) -> None:
        """What the engine says of the request's tokens."""
        if isinstance(usage, Mapping):
            prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens", 0)
            if is_count(prompt) and is_count(output):
                self._tokens = (prompt, output)

    def end(self, status: int) -> None:
        """With the status of the answer, 502 of a stream that broke off; only the first counts."""
        if self._ended:
            return
        self._ended = True
        found, model = self.measures, self.model
        found.in_flight.labels(model).dec()
        if self._first is None:
            found.waiting.labels(model).dec()
        found.requests.labels(model, _outcome(status)).inc()
        if status in TURNED_AWAY:
            found.book.turned_away(model)
        output = self._tokens[1] if self._tokens else self._events
        if self._tokens:
            found.prompt_tokens.labels(model).inc(self._tokens[0])
            found.book.ended(model, *self._tokens)
        found.output_tokens.labels(model).inc(output)
        if status == 200:
            found.answer.labels(model).observe(time.monotonic() - self._began)
        self._judge(status, output)

    def _judge(self, status: int, output: int) -> None:
        """Latencies of streams, and whether they met the objectives; one that failed met none."""
        found, model = self.measures, self.model
        ttft_s = None if self._first is None else self._first - self._began
        tpot_s = None
        if self._first is not None and output > 1:
            tpot_s = (self._last - self._first) / (output - 1)
        if ttft_s is not None:
            found.ttft.labels(model).observe(ttft_s)
        if tpot_s is not None:
            found.tpot.labels(model).observe(tpot_s)
        objective = found.objectives.get(model)
        if objective is None or ttft_s is None or status == GONE:
            return
        ttft_met = status == 200 and 1000.0 * ttft_s <= objective.ttft_ms
        tpot_met = status == 200 and (tpot_s is None or 1000.0 * tpot_s <= objective.tpot_ms)
        found.judged.labels(model).inc()
        found.book.judged(model, ttft_met=ttft_met, tpot_met=tpot_met)
        for name, met in (
            ("ttft", ttft_met), ("tpot", tpot_met), ("both", ttft_met and tpot_met),
        ):  # fmt: skip
            found.met.labels(model, name).inc(int(met))


def _outcome(status: int) -> str:
    if status == 200:
        return "ok"
    if status == GONE:
        return "gone"
    if status in TURNED_AWAY:
        return "turned_away"
    return "refused" if status < 500 else "failed"

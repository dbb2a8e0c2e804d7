"""Requests over time: read, checked or drawn at random."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import UnknownNameError
from planner.perf.grids import Floats
from planner.types import Workload
from simulator.errors import TraceError

Ints = NDArray[np.int64]
Z95 = 1.6448536269514722  # 95th percentile of the standard normal distribution
LONGEST_P95 = 4.0  # no drawn length is more than this many times the p95
LONG_SHARE = 0.06  # two-point lengths: share of p95 ones, enough to make it the 95th percentile


@dataclass(frozen=True)
class Trace:
    """Requests by arrival; all arrays have one entry per request."""

    workloads: tuple[str, ...]
    arrival_s: Floats
    workload: Ints  # place in `workloads`
    input_tokens: Ints
    output_tokens: Ints

    def __post_init__(self) -> None:
        late = np.flatnonzero(np.diff(self.arrival_s) < 0)
        if late.size:
            k = int(late[0]) + 1
            raise TraceError(
                f"the trace is out of order: request {k + 1} comes at {self.arrival_s[k]:g} s, "
                f"the one before it at {self.arrival_s[k - 1]:g} s; sort it by timestamp_s"
            )
        for name, values in (("arrival_s", self.arrival_s), ("input_tokens", self.input_tokens)):
            self._refuse(name, values, ~np.isfinite(values) | (values < (name != "arrival_s")))
        self._refuse("output_tokens", self.output_tokens, self.output_tokens < 1)

    @property
    def requests(self) -> int:
        return int(self.arrival_s.size)

    @property
    def duration_s(self) -> float:
        """From time 0 to the last arrival."""
        return float(self.arrival_s[-1]) if self.requests else 0.0

    def _refuse(self, name: str, values: NDArray[np.generic], wrong: NDArray[np.bool_]) -> None:
        found = np.flatnonzero(wrong)
        if found.size:
            k = int(found[0])
            least = "0 s or more" if name == "arrival_s" else "at least 1"
            raise TraceError(
                f"request {k + 1} of the trace has {name} {values[k]}; it must be {least}"
            )


def trace_of_rows(
    workloads: Sequence[Workload],
    timestamp_s: Floats,
    models: Sequence[str],
    input_tokens: Ints,
    output_tokens: Ints,
) -> Trace:
    """A trace as a file has it; `models` name workloads, or models of a single workload.

    Raises TraceError, UnknownNameError: out of order, negative lengths, unknown models.
    """
    places = _places(workloads)
    for name in dict.fromkeys(models):
        if name not in places:
            raise UnknownNameError("model", name, places, "the trace")
        if places[name] < 0:
            raise TraceError(f"several workloads run {name}; the trace has to name the workload")
    index = np.array([places[name] for name in models], dtype=np.int64)
    names = tuple(w.name for w in workloads)
    return Trace(names, timestamp_s, index, input_tokens, output_tokens)


def _places(workloads: Sequence[Workload]) -> dict[str, int]:
    """Workload by its name, and by its model's; -1 where a model has several."""
    places: dict[str, int] = {}
    for k, workload in enumerate(workloads):
        for name in {workload.model.name, workload.model.short_name}:
            places[name] = -1 if name in places else k
    return {**places, **{workload.name: k for k, workload in enumerate(workloads)}}


def fixed_trace(
    workload: Workload, rate_rps: float, requests: int, input_tokens: int, output_tokens: int
) -> Trace:
    """Equal requests at equal intervals."""
    arrival = np.arange(requests) / rate_rps
    whole = np.ones(requests, dtype=np.int64)
    return Trace((workload.name,), arrival, whole * 0, whole * input_tokens, whole * output_tokens)


def draw_lengths(rng: np.random.Generator, mean: float, p95: float, count: int) -> Ints:
    """Tokens of `count` prompts or outputs, at least 1 and at most 4 times the p95.

    Lognormal with this mean and 95th percentile; its parameter s solves ln(p95 / mean) = z s -
    s^2 / 2, which has no solution above exp(z^2 / 2) = 3.9. Then two-point: 6% of p95, the others
    shorter so that the mean holds.
    """
    gap = Z95 * Z95 - 2.0 * math.log(p95 / mean)
    if gap >= 0.0:
        sigma = Z95 - math.sqrt(gap)
        drawn = rng.lognormal(math.log(mean) - sigma * sigma / 2.0, sigma, count)
    else:
        short = max(1.0, (mean - LONG_SHARE * p95) / (1.0 - LONG_SHARE))
        drawn = np.where(rng.random(count) < LONG_SHARE, p95, short)
    return np.clip(np.rint(drawn), 1, math.ceil(LONGEST_P95 * p95)).astype(np.int64)


def merged_trace(workloads: Sequence[Workload], parts: Sequence[tuple[NDArray[Any], ...]]) -> Trace:
    """One trace of (arrival, place of the workload, prompt, output) of every workload."""
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    arrival, index, prompts, outputs = (column[order] for column in columns)
    return Trace(tuple(w.name for w in workloads), arrival, index, prompts, outputs)

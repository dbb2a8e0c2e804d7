"""Streams of requests of one source: repeated, scaled to a rate, drawn, mixed into a trace.

Source: docs/formulation.md, section 10, Arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.perf.grids import Floats
from planner.types import Workload
from simulator.trace import Ints, Trace, draw_lengths, merged_trace

MINUTE_S = 60.0
BUSY_QUANTILE = 0.95  # of a stream's minutes: that one has the rate asked for
COPY_WITHIN_S = 30.0  # how far a copy of a request may come from it


@dataclass(frozen=True)
class Stream:
    """Requests by arrival, from second 0 on; one entry per request."""

    at_s: Floats
    input_tokens: Ints
    output_tokens: Ints

    @property
    def busy_rps(self) -> float:
        """Requests/s of the minute that 95% of the minutes do not exceed."""
        whole = max(1, math.ceil(float(self.at_s[-1]) / MINUTE_S)) if self.at_s.size else 1
        counts = np.bincount((self.at_s // MINUTE_S).astype(int), minlength=whole)
        return float(np.quantile(counts, BUSY_QUANTILE)) / MINUTE_S

    def during(self, minutes: float) -> Stream:
        """Its first minutes; from the beginning again where it is shorter."""
        if not self.at_s.size:
            return self
        period = MINUTE_S * max(1, math.ceil(float(self.at_s[-1]) / MINUTE_S))
        rounds = math.ceil(MINUTE_S * minutes / period)
        at = np.concatenate([self.at_s + period * k for k in range(rounds)])
        inside = at < MINUTE_S * minutes
        index = np.tile(np.arange(self.at_s.size), rounds)[inside]
        return Stream(at[inside], self.input_tokens[index], self.output_tokens[index])

    def scaled(self, factor: float, rng: np.random.Generator) -> Stream:
        """So many times the requests, with the same lengths and minutes."""
        index, at = scaled_arrivals(self.at_s, factor, rng)
        return Stream(at, self.input_tokens[index], self.output_tokens[index])

    def with_lengths(self, input_tokens: Ints, output_tokens: Ints) -> Stream:
        """The same arrivals with other lengths."""
        return Stream(self.at_s, input_tokens, output_tokens)


@dataclass(frozen=True)
class LengthHistogram:
    """Shares of lengths between edges, in tokens."""

    edges: Floats
    shares: Floats

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Whole tokens, at least 1: a bin by its share, log-uniform inside."""
        shares = self.shares / self.shares.sum()
        bins = rng.choice(self.shares.size, size=count, p=shares)
        low, high = np.maximum(self.edges[bins], 1.0), np.maximum(self.edges[bins + 1], 1.0)
        drawn = np.exp(np.log(low) + rng.random(count) * (np.log(high) - np.log(low)))
        tokens: Ints = np.maximum(np.rint(drawn), 1).astype(np.int64)
        return tokens


def scaled_arrivals(at_s: Floats, factor: float, rng: np.random.Generator) -> tuple[Ints, Floats]:
    """Which requests, and when: each as often as the factor says, a fraction of them by chance.

    The first of each stays where it is; copies come within half a minute of it. A factor of 1
    changes nothing.
    """
    copies = math.floor(factor) + (rng.random(at_s.size) < factor % 1.0).astype(np.int64)
    index = np.repeat(np.arange(at_s.size), copies)
    first = np.concatenate([[True], index[1:] != index[:-1]]) if index.size else index > 0
    moved = at_s[index] + np.where(first, 0.0, COPY_WITHIN_S) * (2.0 * rng.random(index.size) - 1.0)
    end = float(at_s[-1]) if at_s.size else 0.0
    moved = np.abs(moved)
    moved = np.where(moved > end, np.maximum(2.0 * end - moved, 0.0), moved)
    order = np.argsort(moved, kind="stable")
    return index[order], moved[order]


def steady_trace(
    workloads: Sequence[Workload],
    rates_rps: Mapping[str, float],
    minutes: float,
    seed: int,
    shape: Sequence[float] = (),
) -> Trace:
    """`steady_stream` of every workload. Equal arguments give equal traces."""
    rng = np.random.default_rng(seed)
    streams = {
        w.name: steady_stream(w, rates_rps.get(w.name, 0.0), minutes, rng, shape) for w in workloads
    }
    return mixed_trace(workloads, streams)


def steady_stream(
    workload: Workload,
    rate_rps: float,
    minutes: float,
    rng: np.random.Generator,
    shape: Sequence[float] = (),
) -> Stream:
    """Poisson arrivals at a rate, or at `shape` times it minute by minute; its own lengths."""
    rates = [rate_rps * factor for factor in shape] if shape else [rate_rps]
    at, lengths = _poisson(rates, 1.0, minutes, rng), workload.lengths
    return Stream(
        at,
        draw_lengths(rng, lengths.mean_input, lengths.p95_input, at.size),
        draw_lengths(rng, lengths.mean_output, lengths.p95_output, at.size),
    )


def drawn_stream(
    rates_rps: Sequence[float],
    window_minutes: float,
    minutes: float,
    inputs: LengthHistogram,
    outputs: LengthHistogram,
    rng: np.random.Generator,
) -> Stream:
    """Poisson arrivals at a rate per window, the windows repeated; lengths of the histograms."""
    at = _poisson(rates_rps, window_minutes, minutes, rng)
    return Stream(at, inputs.draw(rng, at.size), outputs.draw(rng, at.size))


def _poisson(
    rates_rps: Sequence[float], window_minutes: float, minutes: float, rng: np.random.Generator
) -> Floats:
    window_s = MINUTE_S * window_minutes
    count = math.ceil(minutes / window_minutes)
    spans = np.minimum(window_s, MINUTE_S * minutes - window_s * np.arange(count))
    rates = np.array([rates_rps[k % len(rates_rps)] for k in range(count)])
    drawn = rng.poisson(rates * spans)
    begins, lasts = np.repeat(window_s * np.arange(count), drawn), np.repeat(spans, drawn)
    at: Floats = np.sort(begins + lasts * rng.random(begins.size))
    return at


def mixed_trace(workloads: Sequence[Workload], streams: Mapping[str, Stream]) -> Trace:
    """One trace of the streams of several workloads, by name."""
    parts = [
        (s.at_s, np.full(s.at_s.size, k), s.input_tokens, s.output_tokens)
        for k, workload in enumerate(workloads)
        for s in (streams[workload.name],)
    ]
    return merged_trace(workloads, parts)


def scaled_trace(trace: Trace, factor: float, rng: np.random.Generator) -> Trace:
    """So many times the requests of a trace."""
    index, at = scaled_arrivals(trace.arrival_s, factor, rng)
    return Trace(
        trace.workloads,
        at,
        trace.workload[index],
        trace.input_tokens[index],
        trace.output_tokens[index],
    )

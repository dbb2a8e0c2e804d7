"""The requests of a simulation: drawn, shipped, or from files, mixed per workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from catalog.requests import ARRIVALS, RATES, read_arrivals, read_length_histogram
from planner.errors import UnknownNameError
from planner.types import Workload
from simulator.streams import (
    BUSY_QUANTILE,
    LengthHistogram,
    Stream,
    drawn_stream,
    mixed_trace,
    scaled_trace,
    steady_stream,
)
from simulator.trace import Trace, draw_lengths
from tasks.trace_file import read_stream_file, read_trace_file

POISSON, OWN = "poisson", "own"
History = tuple[float, Sequence[float], float]  # minutes of a window, rates, minutes they span


@dataclass(frozen=True, slots=True)
class Load:
    """What requests come."""

    # A source for all workloads, and 'workload=source' for some, by commas. A source is 'poisson'
    # (also where none is given), 'own' (the shipped trace that its lengths are of), a shipped
    # trace, or a file.
    trace: str | None = None
    minutes: float = 10.0
    factor: float = 1.0  # times the plan's demand; of a file, times its requests
    seed: int = 0
    own_lengths: bool = False  # a trace's arrivals with the workload's lengths

    @property
    def name(self) -> str:
        return self.trace or POISSON


def requests_of(
    load: Load,
    workloads: Sequence[Workload],
    demand_rps: Mapping[str, float],
    histories: Mapping[str, History],
) -> Trace:
    """The requests of all workloads by arrival; shipped traces at the demand's rates.

    A shipped trace is scaled so that its p95 minute has the workload's demand.
    Raises TraceError: a file that can't be read as one. UnknownNameError: no such trace or
    workload.
    """
    sources = _sources(load, workloads)
    rng = np.random.default_rng(load.seed)
    if (path := _whole_file(load, sources)) is not None:
        trace = read_trace_file(path, workloads)
        return trace if load.factor == 1.0 else scaled_trace(trace, load.factor, rng)
    streams = {}
    for workload in workloads:
        rate = load.factor * demand_rps.get(workload.name, 0.0)
        source = sources[workload.name]
        stream = _stream(source, workload, rate, load, histories, rng)
        if load.own_lengths:
            lengths, count = workload.lengths, stream.at_s.size
            stream = stream.with_lengths(
                draw_lengths(rng, lengths.mean_input, lengths.p95_input, count),
                draw_lengths(rng, lengths.mean_output, lengths.p95_output, count),
            )
        streams[workload.name] = stream
    return mixed_trace(workloads, streams)


def _sources(load: Load, workloads: Sequence[Workload]) -> dict[str, str]:
    """Source by workload."""
    names = {workload.name for workload in workloads}
    every, single = POISSON, {}
    for item in (load.trace or POISSON).split(","):
        name, sign, source = item.partition("=")
        if not sign:
            every = item
        elif name not in names:
            raise UnknownNameError("workload", name, names, "--trace")
        else:
            single[name] = source
    return {name: single.get(name, every) for name in sorted(names)}


def _whole_file(load: Load, sources: Mapping[str, str]) -> Path | None:
    """The file that has every workload's requests, if that is what is asked for."""
    found = set(sources.values())
    if len(found) > 1 or "=" in load.name:
        return None
    (source,) = found
    return Path(source) if _is_file(source) else None


def _is_file(source: str) -> bool:
    return source not in {POISSON, OWN, *ARRIVALS, *RATES} and (
        bool(Path(source).suffix) or Path(source).exists()
    )


def _stream(
    source: str,
    workload: Workload,
    rate_rps: float,
    load: Load,
    histories: Mapping[str, History],
    rng: np.random.Generator,
) -> Stream:
    if source == OWN:
        source = workload.lengths.name if workload.lengths.name in ARRIVALS else POISSON
    if source == POISSON:
        return steady_stream(workload, rate_rps, load.minutes, rng)
    if _is_file(source):
        stream = read_stream_file(Path(source))
        return stream if load.factor == 1.0 else stream.scaled(load.factor, rng)
    if source in ARRIVALS:
        stream = _arrivals(source)
        return stream.during(load.minutes).scaled(rate_rps / stream.busy_rps, rng)
    if source in RATES:
        return _rates(source, rate_rps, load.minutes, histories, rng)
    raise UnknownNameError("trace", source, [POISSON, OWN, *ARRIVALS, *RATES])


def _arrivals(name: str) -> Stream:
    frame = read_arrivals(name)
    return Stream(
        frame["timestamp_s"].to_numpy(),
        frame["input_tokens"].to_numpy().astype(np.int64),
        frame["output_tokens"].to_numpy().astype(np.int64),
    )


def _rates(
    name: str,
    rate_rps: float,
    minutes: float,
    histories: Mapping[str, History],
    rng: np.random.Generator,
) -> Stream:
    """From the published rates' beginning on, their p95 window at the rate asked for."""
    window_minutes, published, _ = histories[name]
    rates = rate_rps / float(np.quantile(published, BUSY_QUANTILE)) * np.array(published)
    inputs, outputs = (
        LengthHistogram(np.array(edges), np.array(shares))
        for edges, shares in (read_length_histogram(name, kind) for kind in ("input", "output"))
    )
    return drawn_stream(rates.tolist(), window_minutes, minutes, inputs, outputs, rng)

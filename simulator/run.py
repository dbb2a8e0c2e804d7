"""Run a trace through a fleet: arrays in, one compiled pass, arrays out.

Source: docs/formulation.md, section 10.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from planner.perf.grids import Floats
from planner.perf.model import PerformanceModel
from simulator.errors import SimulationError
from simulator.fleet import Engine, groups_of
from simulator.kernels import types as k
from simulator.kernels.loop import run
from simulator.records import (
    empty_state,
    engine_arrays,
    most_events,
    request_arrays,
    route_arrays,
    table_sizes,
)
from simulator.tables import build_tables
from simulator.trace import Trace

Ints = NDArray[np.int64]


class Status(IntEnum):
    """How a request ended."""

    UNFINISHED = k.WAITING
    DONE = k.DONE
    LOST = k.LOST  # no engine that serves its model was up
    TOO_LONG = k.TOO_LONG  # longer than any KV pool
    FAILED = k.FAILED  # its engine died after the first token


class EventKind(IntEnum):
    """What can happen to an engine."""

    STARTED = k.STARTED
    DRAINED = k.DRAINED  # takes no new requests, ends those it has
    DIED = k.DIED


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """Something that happens to an engine during the run."""

    at_s: float
    kind: EventKind
    engine: str


@dataclass(frozen=True, slots=True)
class NewPlan:
    """Routing weights from some time on, in place of the engines' own or those before."""

    at_s: float
    weights: Mapping[str, Mapping[str, float]]  # by engine and workload; others take nothing


@dataclass(frozen=True)
class Result:
    """What became of every request (arrays in the order of the trace) and of every lane."""

    trace: Trace
    engines: tuple[Engine, ...]
    status: Ints
    start_ms: Floats  # first scheduled; -1: never
    handed_ms: Floats  # its prompt done at a prefill engine; -1: never
    first_ms: Floats  # first token; -1: never
    finish_ms: Floats
    engine: Ints  # the last one; -1: none
    generated: Ints
    preemptions: Ints
    lane_busy_ms: Floats  # in the order of engines, stages, lanes
    lane_peak_blocks: Ints
    lane_held_blocks: Ints  # at the end; 0 unless requests are unfinished
    iterations: int  # micro-batches of all engines
    scheduled_tokens: int
    end_s: float  # last request's end
    wall_s: float


def simulate(
    engines: Sequence[Engine],
    trace: Trace,
    performance: PerformanceModel,
    events: Sequence[FleetEvent] = (),
    plans: Sequence[NewPlan] = (),
) -> Result:
    """Serve the trace with the fleet; engines with a STARTED event are down before it.

    Raises SimulationError: an event or a plan names no engine, or a step is beyond the performance
    model.
    """
    static, lane_total, stage_total, totals = engine_arrays(engines)
    numbers = {engine.name: e for e, engine in enumerate(engines)}
    for name in [event.engine for event in events] + [name for p in plans for name in p.weights]:
        if name not in numbers:
            raise SimulationError(f"an event names engine {name!r}, which does not exist")
    tables = build_tables(performance, groups_of(engines), table_sizes(engines, trace))
    weights = [{e.name: e.weights for e in engines}, *(plan.weights for plan in plans)]
    routes = route_arrays(engines, trace.workloads, weights)
    requests = request_arrays(trace)
    heap = most_events(engines, [event.engine for event in events]) + len(plans)
    state = empty_state(engines, static, routes, lane_total, stage_total, totals, heap)
    for event in events:
        if event.kind is EventKind.STARTED:
            state.up[numbers[event.engine]] = state.alive[numbers[event.engine]] = 0
    changes = [(plan.at_s, k.REPLANNED, p) for p, plan in enumerate(plans, start=1)]
    changes += [(event.at_s, int(event.kind), numbers[event.engine]) for event in events]
    happens = k.Events(
        np.array([at_s * 1e3 for at_s, _, _ in changes], dtype=float),
        np.array([kind for _, kind, _ in changes], dtype=np.int64),
        np.array([number for _, _, number in changes], dtype=np.int64),
    )
    began = time.perf_counter()
    run(tables, static, routes, happens, requests, state)
    wall_s = time.perf_counter() - began
    ends = np.maximum(requests.finish_ms, requests.arrival_ms)
    return Result(
        trace=trace,
        engines=tuple(engines),
        status=requests.status,
        start_ms=requests.start_ms,
        handed_ms=requests.handed_ms,
        first_ms=requests.first_ms,
        finish_ms=requests.finish_ms,
        engine=requests.engine,
        generated=requests.generated,
        preemptions=requests.preemptions,
        lane_busy_ms=state.lane_busy_ms,
        lane_peak_blocks=static.lane_blocks - state.lane_least_free,
        lane_held_blocks=static.lane_blocks - state.lane_free,
        iterations=int(state.counters[k.ITERATIONS]),
        scheduled_tokens=int(state.counters[k.SCHEDULED_TOKENS]),
        end_s=float(ends.max(initial=0.0)) / 1e3,
        wall_s=wall_s,
    )

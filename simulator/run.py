"""Run a trace through a fleet: arrays in, one compiled pass, arrays out.

Source: docs/formulation.md, section 10.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from planner.perf.grids import Floats
from planner.perf.model import PerformanceModel
from planner.types import Phase
from simulator.errors import SimulationError
from simulator.fleet import Engine, groups_of
from simulator.kernels import types as k
from simulator.kernels.loop import run
from simulator.tables import TableSizes, build_tables
from simulator.trace import Trace

Ints = NDArray[np.int64]
SENDING_SLOTS = 64  # prompts of a prefill engine whose KV is on its way, beside the running ones
PHASES = {Phase.PREFILL: k.PREFILL, Phase.DECODE: k.DECODE, Phase.AGGREGATED: k.AGGREGATED}


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


@dataclass(frozen=True)
class Result:
    """What became of every request (arrays in the order of the trace) and of every lane."""

    trace: Trace
    engines: tuple[Engine, ...]
    status: Ints
    start_ms: Floats  # first scheduled; -1: never
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
) -> Result:
    """Serve the trace with the fleet; engines with a STARTED event are down before it.

    Raises SimulationError: an event names no engine, or a step is beyond the performance model.
    """
    static, lane_total, stage_total, totals = _engines(engines)
    numbers = {engine.name: e for e, engine in enumerate(engines)}
    for event in events:
        if event.engine not in numbers:
            raise SimulationError(f"an event names engine {event.engine!r}, which does not exist")
    tables = build_tables(performance, groups_of(engines), _sizes(engines, trace))
    routes = _routes(engines, trace.workloads)
    requests = _requests(trace)
    state = _state(
        engines, static, lane_total, stage_total, totals, _most_events(engines, trace, events)
    )
    for event in events:
        if event.kind is EventKind.STARTED:
            state.up[numbers[event.engine]] = state.alive[numbers[event.engine]] = 0
    happens = k.Events(
        np.array([event.at_s * 1e3 for event in events], dtype=float),
        np.array([int(event.kind) for event in events], dtype=np.int64),
        np.array([numbers[event.engine] for event in events], dtype=np.int64),
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


def _most_events(engines: Sequence[Engine], trace: Trace, events: Sequence[FleetEvent]) -> int:
    """Room for all events that can wait at once: steps, free stages, KV on its way, given ones.

    An engine that dies leaves those behind which it had; nothing grows the heap during the run.
    """
    own = {e.name: e.micro_batches + 1 for e in engines}
    sending = {e.name: e.most_requests + SENDING_SLOTS for e in engines if e.phase is Phase.PREFILL}
    lives = [e.name for e in engines] + [event.engine for event in events]
    return len(events) + sum(own[name] + sending.get(name, 0) for name in lives) + 1


def _sizes(engines: Sequence[Engine], trace: Trace) -> TableSizes:
    longest = int((trace.input_tokens + trace.output_tokens).max(initial=1))
    pool = max(lane.kv_blocks for e in engines for s in e.stages for lane in s.lanes)
    return TableSizes(
        requests=max(engine.most_requests for engine in engines) + 1,
        tokens=max(engine.token_budget for engine in engines),
        context=min(longest, pool * k.BLOCK_TOKENS),
    )


def _engines(engines: Sequence[Engine]) -> tuple[k.Engines, int, int, tuple[int, int, int]]:
    """Flat arrays, and how many lanes, stages and (slots, batch places, items) there are."""
    kinds = [kind.key for kind in groups_of(engines)]
    domains = sorted({engine.domain for engine in engines})
    stages = [stage for engine in engines for stage in engine.stages]
    lanes = [lane for stage in stages for lane in stage.lanes]
    slots = [e.most_requests + SENDING_SLOTS * (e.phase is Phase.PREFILL) for e in engines]
    places = [e.micro_batches for e in engines]
    items = [e.micro_batches * e.most_requests for e in engines]

    def ints(values: Sequence[int]) -> Ints:
        return np.array(values, dtype=np.int64)

    def firsts(counts: Sequence[int]) -> Ints:
        return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)

    static = k.Engines(
        phase=ints([PHASES[e.phase] for e in engines]),
        domain=ints([domains.index(e.domain) for e in engines]),
        stage_first=firsts([len(e.stages) for e in engines]),
        stages=ints([len(e.stages) for e in engines]),
        micro_batches=ints(places),
        step_requests=ints([e.step_requests for e in engines]),
        most_requests=ints([e.most_requests for e in engines]),
        token_budget=ints([e.token_budget for e in engines]),
        slot_first=firsts(slots),
        slots=ints(slots),
        batch_first=firsts(places),
        item_first=firsts(items),
        hop_latency_ms=np.array([e.hop_latency_ms for e in engines]),
        hop_ms_per_token=np.array([e.hop_ms_per_token for e in engines]),
        send_ms_per_token=np.array([e.kv_ms_per_token for e in engines]),
        receive_ms_per_token=np.array([e.kv_ms_per_token for e in engines]),
        lane_first=firsts([len(stage.lanes) for stage in stages]),
        lanes=ints([len(stage.lanes) for stage in stages]),
        layers=ints([stage.layers for stage in stages]),
        has_head=ints([stage.has_head for stage in stages]),
        lane_table=ints([kinds.index(lane.kind.key) for lane in lanes]),
        lane_overhead_ms=np.array([lane.overhead_ms for lane in lanes]),
        lane_blocks=ints([lane.kv_blocks for lane in lanes]),
        lane_weight=np.array([lane.weight for lane in lanes]),
    )
    return static, len(lanes), len(stages), (sum(slots), sum(places), sum(items))


def _routes(engines: Sequence[Engine], workloads: Sequence[str]) -> k.Routes:
    entry = _route(engines, workloads, (Phase.PREFILL, Phase.AGGREGATED))
    return k.Routes(*entry, *_route(engines, workloads, (Phase.DECODE,)))


def _route(
    engines: Sequence[Engine], workloads: Sequence[str], phases: tuple[Phase, ...]
) -> tuple[Ints, Ints, Floats]:
    """First places by workload, then engines with a weight above zero and their weights."""
    found = [
        [
            (number, engine.weights[name])
            for number, engine in enumerate(engines)
            if engine.phase in phases and engine.weights.get(name, 0.0) > 0.0
        ]
        for name in workloads
    ]
    flat = [pair for pairs in found for pair in pairs]
    return (
        np.cumsum([0, *(len(pairs) for pairs in found)]).astype(np.int64),
        np.array([number for number, _ in flat], dtype=np.int64),
        np.array([weight for _, weight in flat], dtype=float),
    )


def _requests(trace: Trace) -> k.Requests:
    n = trace.requests
    zero, none = np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    never = np.full(n, -1.0)
    return k.Requests(
        arrival_ms=trace.arrival_s * 1e3,
        workload=trace.workload.astype(np.int64),
        input_tokens=trace.input_tokens.astype(np.int64),
        output_tokens=trace.output_tokens.astype(np.int64),
        status=zero.copy(),
        start_ms=never.copy(),
        first_ms=never.copy(),
        finish_ms=never.copy(),
        engine=none.copy(),
        generated=zero.copy(),
        preemptions=zero.copy(),
        next=none.copy(),
        received=zero.copy(),
        slot=none.copy(),
        target=none.copy(),
        attempt=zero.copy(),
    )


def _state(
    engines: Sequence[Engine],
    static: k.Engines,
    lanes: int,
    stages: int,
    totals: tuple[int, int, int],
    heap: int,
) -> k.State:
    slots, places, items = totals
    count = len(engines)

    def zeros(size: int) -> Ints:
        return np.zeros(size, dtype=np.int64)

    return k.State(
        up=np.ones(count, dtype=np.int64),
        alive=np.ones(count, dtype=np.int64),
        epoch=zeros(count),
        waiting=zeros(count),
        queue_head=zeros(count) - 1,
        queue_tail=zeros(count) - 1,
        running=zeros(count),
        outstanding=zeros(count),
        sent=zeros(count),
        in_flight=zeros(count),
        ready_at=np.full(count, -1.0),
        sender_free_ms=np.zeros(count),
        receiver_free_ms=np.zeros(count),
        busy_until=np.zeros(stages),
        lane_free=static.lane_blocks.copy(),
        lane_least_free=static.lane_blocks.copy(),
        lane_used=zeros(lanes),
        lane_busy_ms=np.zeros(lanes),
        decodes=zeros(lanes),
        context=np.zeros(lanes),
        tokens=zeros(lanes),
        prompt_ms=np.zeros(lanes),
        rows=zeros(lanes),
        slot_request=zeros(slots) - 1,
        slot_computed=zeros(slots),
        slot_steps=zeros(slots),
        slot_blocks=zeros(slots),
        slot_lane=np.zeros((slots, k.MOST_STAGES), dtype=np.int64),
        order=zeros(slots),
        free_slot=np.arange(slots, dtype=np.int64),
        free_slots=static.slots.copy(),
        batch_items=zeros(places),
        item_slot=zeros(items),
        item_emits=zeros(items),
        heap_ms=np.zeros(heap),
        heap_order=zeros(heap),
        heap_kind=zeros(heap),
        heap_a=zeros(heap),
        heap_b=zeros(heap),
        heap_c=zeros(heap),
        counters=zeros(4),
    )

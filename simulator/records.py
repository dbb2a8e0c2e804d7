"""Arrays of a run: the fleet, its routes, the requests and the state before anything happens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.perf.grids import Floats
from planner.types import Phase
from simulator.fleet import Engine, groups_of
from simulator.kernels import types as k
from simulator.tables import TableSizes
from simulator.trace import Trace

Ints = NDArray[np.int64]
Weights = Mapping[str, Mapping[str, float]]  # by engine and workload
SENDING_SLOTS = 64  # prompts of a prefill engine whose KV is on its way, beside the running ones
PHASES = {Phase.PREFILL: k.PREFILL, Phase.DECODE: k.DECODE, Phase.AGGREGATED: k.AGGREGATED}


def most_events(engines: Sequence[Engine], events: Sequence[str]) -> int:
    """Room for all events that can wait at once: steps, free stages, KV on its way, given ones.

    `events` are the engines of those given.

    An engine that dies leaves those behind which it had; nothing grows the heap during the run.
    """
    own = {e.name: e.micro_batches + 1 for e in engines}
    sending = {e.name: e.most_requests + SENDING_SLOTS for e in engines if e.phase is Phase.PREFILL}
    lives = [e.name for e in engines] + list(events)
    return len(events) + sum(own[name] + sending.get(name, 0) for name in lives) + 1


def table_sizes(engines: Sequence[Engine], trace: Trace) -> TableSizes:
    longest = int((trace.input_tokens + trace.output_tokens).max(initial=1))
    pool = max(lane.kv_blocks for e in engines for s in e.stages for lane in s.lanes)
    return TableSizes(
        requests=max(engine.most_requests for engine in engines) + 1,
        tokens=max(engine.token_budget for engine in engines),
        context=min(longest, pool * k.BLOCK_TOKENS),
    )


def engine_arrays(engines: Sequence[Engine]) -> tuple[k.Engines, int, int, tuple[int, int, int]]:
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
        lane_budget=ints([tokens for e in engines for tokens in _lane_budgets(e)]),
    )
    return static, len(lanes), len(stages), (sum(slots), sum(places), sum(items))


def _lane_budgets(engine: Engine) -> list[int]:
    """Tokens of a micro-batch by lane: aggregated, its share, since a prompt stays on one lane."""
    if engine.phase is not Phase.AGGREGATED:
        return [engine.token_budget for stage in engine.stages for _ in stage.lanes]
    return [
        math.ceil(engine.token_budget * lane.weight / sum(other.weight for other in stage.lanes))
        for stage in engine.stages
        for lane in stage.lanes
    ]


def route_arrays(
    engines: Sequence[Engine], workloads: Sequence[str], plans: Sequence[Weights]
) -> k.Routes:
    whole, prefill, decode = (
        _route(engines, workloads, plans, phase)
        for phase in (Phase.AGGREGATED, Phase.PREFILL, Phase.DECODE)
    )
    return k.Routes(*whole, *prefill, *decode)


def _route(
    engines: Sequence[Engine],
    workloads: Sequence[str],
    plans: Sequence[Weights],
    phase: Phase,
) -> tuple[Ints, Ints, Ints, Floats]:
    """First places by workload, then engines with a weight in any plan, groups, weights by plan."""
    groups = {engine.group or engine.name: k for k, engine in enumerate(engines)}
    found = [
        sorted(
            (groups[engine.group or engine.name], number, weights)
            for number, engine in enumerate(engines)
            if engine.phase is phase
            and any(weights := [plan.get(engine.name, {}).get(name, 0.0) for plan in plans])
        )
        for name in workloads
    ]
    flat = [item for items in found for item in items]
    return (
        np.cumsum([0, *(len(items) for items in found)]).astype(np.int64),
        np.array([number for _, number, _ in flat], dtype=np.int64),
        np.array([group for group, _, _ in flat], dtype=np.int64),
        np.array([weights for *_, weights in flat], dtype=float).reshape(-1, len(plans)).T.copy(),
    )


def request_arrays(trace: Trace) -> k.Requests:
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
        handed_ms=never.copy(),
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


def empty_state(
    engines: Sequence[Engine],
    static: k.Engines,
    routes: k.Routes,
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
        whole_sent=zeros(routes.whole_engine.size),
        prefill_sent=zeros(routes.prefill_engine.size),
        decode_sent=zeros(routes.decode_engine.size),
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
        slot_lane=np.zeros(
            (slots, max([len(e.stages) for e in engines], default=1)), dtype=np.int64
        ),
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
        counters=zeros(5),
    )

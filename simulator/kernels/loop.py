"""The event loop: arrivals, steps that end, KV that arrives, engines that come and go."""

from __future__ import annotations

from simulator.kernels.compiled import compiled, entry
from simulator.kernels.heap import drop_first, push
from simulator.kernels.memory import give_back
from simulator.kernels.routing import choose_decode, enter, forget_sent, pop_front, push_back
from simulator.kernels.steps import start_steps
from simulator.kernels.types import (
    DIED,
    DONE,
    DRAINED,
    FAILED,
    HEAP_SIZE,
    LOST,
    PLAN,
    PREFILL,
    READY,
    RECEIVED,
    REPLANNED,
    STARTED,
    STEPPED,
    Engines,
    Events,
    Requests,
    Routes,
    State,
    Tables,
)


@entry
def run(
    tables: Tables,
    engines: Engines,
    routes: Routes,
    events: Events,
    requests: Requests,
    state: State,
) -> None:
    """Until every request has ended, or nothing more can happen."""
    for k in range(events.at_ms.size):
        push(state, events.at_ms[k], events.kind[k], events.number[k], 0, 0)
    r, count = 0, requests.arrival_ms.size
    while r < count or state.counters[HEAP_SIZE] > 0:
        if r < count and (
            state.counters[HEAP_SIZE] == 0 or requests.arrival_ms[r] < state.heap_ms[0]
        ):
            e = enter(engines, routes, state, requests, r)
            if e >= 0:
                start_steps(tables, engines, state, requests, e, requests.arrival_ms[r])
            r += 1
            continue
        now, kind = state.heap_ms[0], state.heap_kind[0]
        a, b, c = state.heap_a[0], state.heap_b[0], state.heap_c[0]
        drop_first(state)
        if kind in (STEPPED, READY):
            if c != state.epoch[a]:
                continue
            if kind == STEPPED:
                _end_step(engines, routes, state, requests, a, b, now)
            else:
                state.ready_at[a] = -1.0
            start_steps(tables, engines, state, requests, a, now)
        elif kind == RECEIVED:
            if c != requests.attempt[a]:
                continue
            e = requests.engine[a]
            _receive(engines, state, requests, e, a)
            if state.alive[b]:
                requests.received[a] = 1
                push_back(state, requests, b, a)
            else:
                _again(tables, engines, routes, state, requests, b, a, now)
            start_steps(tables, engines, state, requests, e, now)
            start_steps(tables, engines, state, requests, b, now)
        elif kind == STARTED:
            forget_sent(state)
            state.up[a] = 1
            state.alive[a] = 1
        elif kind == DRAINED:
            forget_sent(state)
            state.up[a] = 0
        elif kind == REPLANNED:
            forget_sent(state)
            state.counters[PLAN] = a
        elif kind == DIED:
            forget_sent(state)
            _die(tables, engines, routes, state, requests, a, now)


@compiled
def _end_step(
    engines: Engines,
    routes: Routes,
    state: State,
    requests: Requests,
    e: int,
    place: int,
    now: float,
) -> None:
    """Tokens come out; requests end, or go on to decode elsewhere."""
    batch = engines.batch_first[e] + place
    first = engines.item_first[e] + place * engines.most_requests[e]
    ended = 0
    for k in range(first, first + state.batch_items[batch]):
        slot = state.item_slot[k]
        state.slot_steps[slot] -= 1
        if not state.item_emits[k]:
            continue
        r = state.slot_request[slot]
        if engines.phase[e] == PREFILL:
            ended += 1
            state.slot_computed[slot] = -1  # leaves the running requests, not yet its slot
            _hand_over(engines, routes, state, requests, e, r, now)
            continue
        requests.generated[r] += 1
        if requests.generated[r] == 1:
            requests.first_ms[r] = now
        if requests.generated[r] >= requests.output_tokens[r]:
            requests.finish_ms[r] = now
            requests.status[r] = DONE
            state.outstanding[e] -= 1
            ended += 1
            state.slot_computed[slot] = -1
            give_back(engines, state, requests, e, slot)
    state.batch_items[batch] = 0
    state.in_flight[e] -= 1
    if ended:
        _close_ranks(engines, state, e)


@compiled
def _close_ranks(engines: Engines, state: State, e: int) -> None:
    """Take those who left out of the order of running requests."""
    first, kept = engines.slot_first[e], 0
    for i in range(state.running[e]):
        slot = state.order[first + i]
        if state.slot_computed[slot] >= 0:
            state.order[first + kept] = slot
            kept += 1
    state.running[e] = kept


@compiled
def _hand_over(
    engines: Engines,
    routes: Routes,
    state: State,
    requests: Requests,
    e: int,
    r: int,
    now: float,
) -> None:
    """Move a prompt's KV to a decode engine: it takes its turn on either side's network.

    The two turns need not meet: neither side stands idle because the other is busy.
    """
    requests.handed_ms[r] = now
    target = choose_decode(engines, routes, state, requests, r, engines.domain[e])
    if target < 0:
        requests.status[r] = LOST
        state.outstanding[e] -= 1
        give_back(engines, state, requests, e, requests.slot[r])
        return
    tokens = requests.input_tokens[r]
    sent = max(now, state.sender_free_ms[e]) + engines.send_ms_per_token[e] * tokens
    received = max(now, state.receiver_free_ms[target])
    received += engines.receive_ms_per_token[target] * tokens
    state.sender_free_ms[e], state.receiver_free_ms[target] = sent, received
    end = max(sent, received)
    requests.engine[r] = e  # until it is received
    push(state, end, RECEIVED, r, target, requests.attempt[r])


@compiled
def _receive(engines: Engines, state: State, requests: Requests, e: int, r: int) -> None:
    """A prompt's KV has arrived at its decode engine: the room at the prefill engine is free."""
    give_back(engines, state, requests, e, requests.slot[r])
    state.outstanding[e] -= 1
    requests.engine[r] = requests.target[r]
    requests.target[r] = -1


@compiled
def _die(
    tables: Tables,
    engines: Engines,
    routes: Routes,
    state: State,
    requests: Requests,
    e: int,
    now: float,
) -> None:
    """Requests that have no token yet are sent again, as the gateway does; the others fail."""
    state.up[e] = 0
    state.alive[e] = 0
    state.epoch[e] += 1
    state.in_flight[e] = 0
    state.ready_at[e] = -1.0
    state.running[e] = 0
    for place in range(engines.micro_batches[e]):
        state.batch_items[engines.batch_first[e] + place] = 0
    for stage in range(engines.stages[e]):
        state.busy_until[engines.stage_first[e] + stage] = now
    while state.waiting[e] > 0:
        _again(tables, engines, routes, state, requests, e, pop_front(state, requests, e), now)
    first = engines.slot_first[e]
    for slot in range(first, first + engines.slots[e]):
        r = state.slot_request[slot]
        if r >= 0:
            give_back(engines, state, requests, e, slot)
            _again(tables, engines, routes, state, requests, e, r, now)


@compiled
def _again(
    tables: Tables,
    engines: Engines,
    routes: Routes,
    state: State,
    requests: Requests,
    e: int,
    r: int,
    now: float,
) -> None:
    state.outstanding[e] -= 1
    if requests.target[r] >= 0:
        state.outstanding[requests.target[r]] -= 1
        requests.target[r] = -1
    requests.attempt[r] += 1
    if requests.generated[r] > 0:
        requests.status[r] = FAILED
        requests.finish_ms[r] = now
        return
    other = enter(engines, routes, state, requests, r)
    if other >= 0:
        start_steps(tables, engines, state, requests, other, now)

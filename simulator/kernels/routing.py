"""Which engine takes a request, and the queue in front of it.

The gateway's rule: of the engines that serve a workload the one with the least requests in flight
per weight takes the next, equal ones by (sent + 1) per weight (executor/gateway/table.py).
"""

from __future__ import annotations

from planner.perf.grids import Floats
from simulator.kernels.compiled import compiled
from simulator.kernels.memory import can_ever_hold
from simulator.kernels.types import LOST, TOO_LONG, Engines, Ints, Requests, Routes, State


@compiled
def enter(engines: Engines, routes: Routes, state: State, requests: Requests, r: int) -> int:
    """Queue a request at its first engine, which is returned; -1: it has ended instead."""
    w = requests.workload[r]
    requests.received[r] = 0
    e = _choose(
        engines, state, requests, r, routes.entry_engine, routes.entry_weight,
        routes.entry_first[w], routes.entry_first[w + 1], -1,
    )  # fmt: skip
    if e < 0:
        requests.status[r] = LOST if e == -1 else TOO_LONG
        return -1
    _take(state, requests, e, r)
    push_back(state, requests, e, r)
    return e


@compiled
def choose_decode(
    engines: Engines, routes: Routes, state: State, requests: Requests, r: int, domain: int
) -> int:
    """The decode engine for a prompt that is done, in flight from now on; -1: there is none."""
    w = requests.workload[r]
    e = _choose(
        engines, state, requests, r, routes.decode_engine, routes.decode_weight,
        routes.decode_first[w], routes.decode_first[w + 1], domain,
    )  # fmt: skip
    if e < 0:
        return -1
    _take(state, requests, e, r)
    return e


@compiled
def push_back(state: State, requests: Requests, e: int, r: int) -> None:
    """To the end of the engine's queue."""
    requests.next[r] = -1
    if state.waiting[e] == 0:
        state.queue_head[e] = r
    else:
        requests.next[state.queue_tail[e]] = r
    state.queue_tail[e] = r
    state.waiting[e] += 1


@compiled
def push_front(state: State, requests: Requests, e: int, r: int) -> None:
    """Before all others: a preempted request."""
    requests.next[r] = state.queue_head[e] if state.waiting[e] else -1
    if state.waiting[e] == 0:
        state.queue_tail[e] = r
    state.queue_head[e] = r
    state.waiting[e] += 1


@compiled
def pop_front(state: State, requests: Requests, e: int) -> int:
    """Take the first of the queue."""
    r = state.queue_head[e]
    state.queue_head[e] = requests.next[r]
    state.waiting[e] -= 1
    return r


@compiled
def _take(state: State, requests: Requests, e: int, r: int) -> None:
    requests.engine[r] = e
    state.outstanding[e] += 1
    state.sent[e] += 1


@compiled
def _choose(
    engines: Engines,
    state: State,
    requests: Requests,
    r: int,
    candidates: Ints,
    weights: Floats,
    first: int,
    last: int,
    domain: int,
) -> int:
    """The engine of least load; -1: none is up, -2: none could ever hold the request."""
    best, least, least_sent, any_up = -1, 0.0, 0.0, False
    whole = requests.input_tokens[r] + requests.output_tokens[r]
    for k in range(first, last):
        e = candidates[k]
        if not state.up[e] or (domain >= 0 and engines.domain[e] != domain):
            continue
        any_up = True
        if not can_ever_hold(engines, e, whole):
            continue
        load = state.outstanding[e] / weights[k]
        sent = (state.sent[e] + 1) / weights[k]
        if best < 0 or load < least or (load == least and sent < least_sent):
            best, least, least_sent = e, load, sent
    if best >= 0:
        return best
    return -2 if any_up else -1

"""Which engine takes a request, and the queue in front of it.

The gateway's rule: of the engines that serve a workload the one with the least requests in flight
per weight takes the next, equal ones by (sent + 1) per weight; a pair of prefill and decode
competes by its decode engine (executor/gateway/table.py, serve.py).
"""

from __future__ import annotations

from planner.perf.grids import Floats
from simulator.kernels.compiled import compiled
from simulator.kernels.memory import can_ever_hold
from simulator.kernels.types import (
    LOST,
    PLAN,
    PREFILL,
    TOO_LONG,
    Engines,
    Ints,
    Requests,
    Routes,
    State,
)


@compiled
def enter(engines: Engines, routes: Routes, state: State, requests: Requests, r: int) -> int:
    """Queue a request at its first engine, which is returned; -1: it has ended instead.

    The least loaded aggregated engine and the least loaded decode engine compete for it; where the
    latter wins, a prefill engine of its domain takes the prompt.
    """
    w = requests.workload[r]
    requests.received[r] = 0
    whole = _choose(
        engines, state, requests, r, routes.whole_engine, routes.whole_weight,
        routes.whole_first[w], routes.whole_first[w + 1], -1,
    )  # fmt: skip
    pair = _choose(
        engines, state, requests, r, routes.decode_engine, routes.decode_weight,
        routes.decode_first[w], routes.decode_first[w + 1], -1,
    )  # fmt: skip
    first = pair
    if pair >= 0:
        first = _choose_prefill(
            engines, routes, state, requests, r, engines.domain[routes.decode_engine[pair]]
        )
    e = -1
    if first >= 0:
        e = routes.prefill_engine[first]
    if whole >= 0 and (
        e < 0
        or _load(state, routes.whole_engine, routes.whole_weight, whole)
        <= _load(state, routes.decode_engine, routes.decode_weight, pair)
    ):
        e = routes.whole_engine[whole]
    if e < 0:
        requests.status[r] = TOO_LONG if whole == -2 or first == -2 else LOST
        return -1
    _take(state, requests, e, r)
    push_back(state, requests, e, r)
    if engines.phase[e] == PREFILL:
        _expect(state, requests, routes.decode_engine[pair], r)
    return e


@compiled
def _expect(state: State, requests: Requests, e: int, r: int) -> None:
    """A decode engine counts a request from its entry on."""
    requests.target[r] = e
    state.outstanding[e] += 1
    state.sent[e] += 1


@compiled
def _choose_prefill(
    engines: Engines, routes: Routes, state: State, requests: Requests, r: int, domain: int
) -> int:
    """A prefill engine of the domain, or of another one where it has none."""
    w = requests.workload[r]
    for where in (domain, -1):
        found = _choose(
            engines, state, requests, r, routes.prefill_engine, routes.prefill_weight,
            routes.prefill_first[w], routes.prefill_first[w + 1], where,
        )  # fmt: skip
        if found != -1:
            break
    return found


@compiled
def choose_decode(
    engines: Engines, routes: Routes, state: State, requests: Requests, r: int, domain: int
) -> int:
    """The decode engine for a prompt that is done: the one chosen at entry, where that is still up.

    Else another one of the domain; -1: there is none.
    """
    e = requests.target[r]
    if e >= 0:
        if state.up[e] and engines.domain[e] == domain:
            return e
        state.outstanding[e] -= 1
        requests.target[r] = -1
    w = requests.workload[r]
    found = _choose(
        engines, state, requests, r, routes.decode_engine, routes.decode_weight,
        routes.decode_first[w], routes.decode_first[w + 1], domain,
    )  # fmt: skip
    if found < 0:
        return -1
    e = routes.decode_engine[found]
    _expect(state, requests, e, r)
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
def _load(state: State, candidates: Ints, weights: Floats, k: int) -> float:
    return state.outstanding[candidates[k]] / weights[state.counters[PLAN], k]


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
    """Place of the engine of least load; -1: none is up, -2: none could ever hold the request."""
    best, least, least_sent, any_up = -1, 0.0, 0.0, False
    whole = requests.input_tokens[r] + requests.output_tokens[r]
    plan = state.counters[PLAN]
    for k in range(first, last):
        e, weight = candidates[k], weights[plan, k]
        if weight <= 0.0 or not state.up[e] or (domain >= 0 and engines.domain[e] != domain):
            continue
        any_up = True
        if not can_ever_hold(engines, e, whole):
            continue
        load = state.outstanding[e] / weight
        sent = (state.sent[e] + 1) / weight
        if best < 0 or load < least or (load == least and sent < least_sent):
            best, least, least_sent = k, load, sent
    if best >= 0:
        return best
    return -2 if any_up else -1

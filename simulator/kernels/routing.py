"""Which engine takes a request, and the queue in front of it.

The engines of equal replicas are a group. A workload's requests go to groups in the proportions of
the plan: next is the group with the least (sent + 1) per requests/s planned of its engines that are
up. In the group the engine with the least requests in flight per weight takes it. A pair of prefill
and decode is chosen by its decode group, then a prefill group of that domain in the same way.
"""

from __future__ import annotations

from planner.perf.grids import Floats
from simulator.kernels.compiled import compiled
from simulator.kernels.memory import can_ever_hold
from simulator.kernels.types import (
    LOST,
    PLAN,
    TOO_LONG,
    Engines,
    Ints,
    Requests,
    Routes,
    State,
)


@compiled
def enter(engines: Engines, routes: Routes, state: State, requests: Requests, r: int) -> int:
    """Queue a request at its first engine, which is returned; -1: it has ended instead."""
    w = requests.workload[r]
    requests.received[r] = 0
    whole, whole_score = _choose(
        engines, state, requests, r, routes.whole_engine, routes.whole_group, routes.whole_weight,
        state.whole_sent, routes.whole_first[w], routes.whole_first[w + 1], -1,
    )  # fmt: skip
    pair, pair_score = _choose(
        engines, state, requests, r, routes.decode_engine, routes.decode_group,
        routes.decode_weight, state.decode_sent, routes.decode_first[w],
        routes.decode_first[w + 1], -1,
    )  # fmt: skip
    first = pair
    if pair >= 0 and (whole < 0 or pair_score < whole_score):
        domain = engines.domain[routes.decode_engine[pair]]
        first = _choose_prefill(engines, routes, state, requests, r, domain)
        if first >= 0:
            e = routes.prefill_engine[first]
            state.prefill_sent[first] += 1
            state.decode_sent[pair] += 1
            requests.target[r] = routes.decode_engine[pair]
            state.outstanding[requests.target[r]] += 1
            return _queue(state, requests, e, r)
    if whole < 0:
        requests.status[r] = TOO_LONG if whole == -2 or first == -2 else LOST
        return -1
    state.whole_sent[whole] += 1
    return _queue(state, requests, routes.whole_engine[whole], r)


@compiled
def _queue(state: State, requests: Requests, e: int, r: int) -> int:
    requests.engine[r] = e
    state.outstanding[e] += 1
    push_back(state, requests, e, r)
    return e


@compiled
def _choose_prefill(
    engines: Engines, routes: Routes, state: State, requests: Requests, r: int, domain: int
) -> int:
    """A prefill engine of the domain, or of another one where it has none."""
    w = requests.workload[r]
    for where in (domain, -1):
        found, _ = _choose(
            engines, state, requests, r, routes.prefill_engine, routes.prefill_group,
            routes.prefill_weight, state.prefill_sent, routes.prefill_first[w],
            routes.prefill_first[w + 1], where,
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
    found, _ = _choose(
        engines, state, requests, r, routes.decode_engine, routes.decode_group,
        routes.decode_weight, state.decode_sent, routes.decode_first[w],
        routes.decode_first[w + 1], domain,
    )  # fmt: skip
    if found < 0:
        return -1
    e = routes.decode_engine[found]
    state.decode_sent[found] += 1
    requests.target[r] = e
    state.outstanding[e] += 1
    return e


@compiled
def forget_sent(state: State) -> None:
    """Shares begin anew with a plan, and with who is up."""
    state.whole_sent[:] = 0
    state.prefill_sent[:] = 0
    state.decode_sent[:] = 0


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
def _choose(
    engines: Engines,
    state: State,
    requests: Requests,
    r: int,
    candidates: Ints,
    groups: Ints,
    weights: Floats,
    sent: Ints,
    first: int,
    last: int,
    domain: int,
) -> tuple[int, float]:
    """Place of the engine, and (sent + 1) per weight of its group.

    -1: none is up, -2: none could ever hold the request.
    """
    whole = requests.input_tokens[r] + requests.output_tokens[r]
    plan = state.counters[PLAN]
    best, best_score, any_up = -1, 0.0, False
    k = first
    while k < last:
        group, count, weight = groups[k], 1, 0.0
        mine, least = -1, 0.0
        while k < last and groups[k] == group:
            e = candidates[k]
            count += sent[k]
            there = weights[plan, k] > 0.0 and state.up[e]
            if there and (domain < 0 or engines.domain[e] == domain):
                any_up = True
                if can_ever_hold(engines, e, whole):
                    weight += weights[plan, k]
                    load = state.outstanding[e] / weights[plan, k]
                    if mine < 0 or load < least:
                        mine, least = k, load
            k += 1
        if mine >= 0 and (best < 0 or count / weight < best_score):
            best, best_score = mine, count / weight
    if best < 0 and any_up:
        best = -2
    return best, best_score

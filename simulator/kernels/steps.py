"""Micro-batches as vLLM V1 makes them: running requests first, then the queue; and their times.

Source: vLLM 0.32, v1/core/sched/scheduler.py, in words: requests in their order of admission take
what they lack of tokens until the budget is spent; whoever finds no KV block has the youngest
preempted, which starts again from the front of the queue; only a step without preemption admits.
Coral's own: a micro-batch holds at most b decodes, or b prompts where an engine does nothing else,
so that M of them share the pipeline; a request is admitted when there is room for its whole prompt.
"""

from __future__ import annotations

from simulator.kernels.compiled import compiled
from simulator.kernels.heap import push
from simulator.kernels.memory import give_back, grow, shares_full_lane, take_slot
from simulator.kernels.routing import pop_front, push_front
from simulator.kernels.types import (
    ITERATIONS,
    PREFILL,
    READY,
    SCHEDULED_TOKENS,
    STEPPED,
    Engines,
    Requests,
    State,
    Tables,
)


@compiled
def start_steps(
    tables: Tables, engines: Engines, state: State, requests: Requests, e: int, now: float
) -> None:
    """Send micro-batches into the pipeline as long as its first stage is free."""
    while state.alive[e] and state.in_flight[e] < engines.micro_batches[e]:
        free_at = state.busy_until[engines.stage_first[e]]
        if free_at > now:
            if state.ready_at[e] < 0.0 and (state.running[e] or state.waiting[e]):
                state.ready_at[e] = free_at
                push(state, free_at, READY, e, 0, state.epoch[e])
            return
        place = _free_batch(engines, state, e)
        tokens = _fill(tables, engines, state, requests, e, place, now)
        if tokens == 0:
            return
        end = _pass_through(tables, engines, state, e, now, tokens)
        state.in_flight[e] += 1
        state.counters[ITERATIONS] += 1
        state.counters[SCHEDULED_TOKENS] += tokens
        push(state, end, STEPPED, e, place, state.epoch[e])


@compiled
def _free_batch(engines: Engines, state: State, e: int) -> int:
    for place in range(engines.micro_batches[e]):
        if state.batch_items[engines.batch_first[e] + place] == 0:
            return place
    return -1


@compiled
def _fill(
    tables: Tables,
    engines: Engines,
    state: State,
    requests: Requests,
    e: int,
    place: int,
    now: float,
) -> int:
    """Choose the items of a micro-batch; returns its new tokens."""
    _clear_lanes(engines, state, e)
    first, budget, taken, preempted = engines.slot_first[e], engines.token_budget[e], 0, False
    prompts = engines.phase[e] == PREFILL
    i = 0
    while i < state.running[e] and budget > 0:
        slot = state.order[first + i]
        r = state.slot_request[slot]
        lacks = requests.input_tokens[r] + requests.generated[r] - state.slot_computed[slot]
        if lacks <= 0 or ((lacks == 1 or prompts) and taken >= engines.step_requests[e]):
            i += 1
            continue
        count = min(lacks, budget)
        if lacks > 1:
            count = min(count, _lanes_take(engines, state, e, slot))
            if count <= 0:
                i += 1
                continue
        outcome = _make_room(engines, state, requests, e, i, state.slot_computed[slot] + count)
        preempted = preempted or outcome != ROOM
        if outcome == GONE:
            break
        if outcome == FULL:
            i += 1
            continue
        taken += _add(tables, engines, state, requests, e, place, slot, count) or prompts
        budget -= count
        i += 1
    while not preempted and budget > 0 and state.waiting[e] > 0:
        if state.running[e] >= engines.most_requests[e]:
            break
        r = state.queue_head[e]
        known = requests.input_tokens[r] + requests.generated[r]
        computed = known - 1 if requests.received[r] else 0
        if (known - computed == 1 or prompts) and taken >= engines.step_requests[e]:
            break
        slot = take_slot(engines, state, requests, e, r)
        if slot < 0:
            break
        pop_front(state, requests, e)
        state.slot_computed[slot] = computed
        state.order[first + state.running[e]] = slot
        state.running[e] += 1
        if requests.start_ms[r] < 0.0:
            requests.start_ms[r] = now
        count = min(known - computed, budget)
        if known - computed > 1:  # a new one goes to the least loaded lanes: a token at least
            count = max(1, min(count, _lanes_take(engines, state, e, slot)))
        taken += _add(tables, engines, state, requests, e, place, slot, count) or prompts
        budget -= count
    return engines.token_budget[e] - budget


@compiled
def _lanes_take(engines: Engines, state: State, e: int, slot: int) -> int:
    """New tokens of a prompt that the slot's lanes have room for in this micro-batch."""
    least = engines.token_budget[e]
    for stage in range(engines.stages[e]):
        lane = state.slot_lane[slot, stage]
        least = min(least, engines.lane_budget[lane] - state.tokens[lane] - state.decodes[lane])
    return least


ROOM, PREEMPTED, FULL, GONE = range(4)  # how _make_room ended


@compiled
def _make_room(
    engines: Engines, state: State, requests: Requests, e: int, i: int, tokens: int
) -> int:
    """Blocks for the i-th running request, at the expense of the youngest.

    PREEMPTED: others made way; FULL: those who could are in flight; GONE: it made way itself.
    """
    slot = state.order[engines.slot_first[e] + i]
    outcome = ROOM
    while not grow(engines, state, e, slot, tokens):
        victim = -1
        for j in range(state.running[e] - 1, i - 1, -1):
            other = state.order[engines.slot_first[e] + j]
            idle = state.slot_steps[other] == 0
            if idle and shares_full_lane(engines, state, e, slot, other):
                victim = j
                break
        if victim < 0:
            return FULL
        _preempt(engines, state, requests, e, victim)
        if victim == i:
            return GONE
        outcome = PREEMPTED
    return outcome


@compiled
def _preempt(engines: Engines, state: State, requests: Requests, e: int, j: int) -> None:
    """The j-th running request gives all up and goes to the front of the queue."""
    first = engines.slot_first[e]
    slot = state.order[first + j]
    r = state.slot_request[slot]
    for k in range(j, state.running[e] - 1):
        state.order[first + k] = state.order[first + k + 1]
    state.running[e] -= 1
    give_back(engines, state, requests, e, slot)
    requests.preemptions[r] += 1
    requests.received[r] = 0  # its KV is gone: it is computed again here
    push_front(state, requests, e, r)


@compiled
def _add(
    tables: Tables,
    engines: Engines,
    state: State,
    requests: Requests,
    e: int,
    place: int,
    slot: int,
    count: int,
) -> int:
    """Put `count` tokens of a slot into the micro-batch; returns 1 for a decode."""
    r = state.slot_request[slot]
    before = state.slot_computed[slot]
    after = before + count
    known = requests.input_tokens[r] + requests.generated[r]
    decode = count == 1 and before > 0
    batch = engines.batch_first[e] + place
    item = engines.item_first[e] + place * engines.most_requests[e] + state.batch_items[batch]
    state.batch_items[batch] += 1
    state.item_slot[item] = slot
    state.item_emits[item] = after == known
    state.slot_steps[slot] += 1
    state.slot_computed[slot] = after
    for stage in range(engines.stages[e]):
        lane = state.slot_lane[slot, stage]
        state.rows[lane] += 1
        if decode:
            state.decodes[lane] += 1
            state.context[lane] += before
        else:
            share = before / after
            state.tokens[lane] += count
            whole = tables.prompt_ms[engines.lane_table[lane], after]
            state.prompt_ms[lane] += whole * (1.0 - share * share)
    return 1 if decode else 0


@compiled
def _clear_lanes(engines: Engines, state: State, e: int) -> None:
    for stage in range(engines.stages[e]):
        g = engines.stage_first[e] + stage
        for i in range(engines.lanes[g]):
            lane = engines.lane_first[g] + i
            state.decodes[lane] = 0
            state.context[lane] = 0.0
            state.tokens[lane] = 0
            state.prompt_ms[lane] = 0.0
            state.rows[lane] = 0


@compiled
def _pass_through(
    tables: Tables, engines: Engines, state: State, e: int, now: float, tokens: int
) -> float:
    """Occupy every stage in turn; returns when the last one is done."""
    hop = engines.hop_latency_ms[e] + engines.hop_ms_per_token[e] * tokens
    at = now
    for stage in range(engines.stages[e]):
        g = engines.stage_first[e] + stage
        start = max(at + (hop if stage else 0.0), state.busy_until[g])
        longest = 0.0
        for i in range(engines.lanes[g]):
            lane = engines.lane_first[g] + i
            if state.rows[lane] > 0:
                step = _step_ms(tables, engines, state, g, lane)
                state.lane_busy_ms[lane] += step
                longest = max(longest, step)
        at = start + longest
        state.busy_until[g] = at
    return at


@compiled
def _step_ms(tables: Tables, engines: Engines, state: State, g: int, lane: int) -> float:
    """One step of a lane. Source: docs/formulation.md, section 1."""
    t, decodes, tokens = engines.lane_table[lane], state.decodes[lane], state.tokens[lane]
    layer = state.prompt_ms[lane]
    if decodes == 0:
        layer += tables.prefill_ms[t, tokens]
    else:
        at = state.context[lane] / decodes / tables.context_step
        low = int(at)
        part = at - low
        times = tables.decode_ms if tokens == 0 else tables.attention_ms
        layer += times[t, decodes, low] * (1.0 - part) + times[t, decodes, low + 1] * part
        if tokens > 0:
            layer += tables.mixed_ms[t, decodes + tokens]
    step = engines.layers[g] * layer + engines.lane_overhead_ms[lane]
    if engines.has_head[g]:
        step += tables.head_ms[t, state.rows[lane]]
    return step

"""KV blocks and slots of an engine's requests.

A request stays on one lane of every stage, so its blocks are taken on each of them. Prompts get
all their blocks when they are admitted, decodes one more whenever the last is full.
"""

from __future__ import annotations

from simulator.kernels.compiled import compiled
from simulator.kernels.types import BLOCK_TOKENS, Engines, Requests, State


@compiled
def blocks_of(tokens: int) -> int:
    """KV blocks of so many tokens."""
    return (tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS


@compiled
def can_ever_hold(engines: Engines, e: int, tokens: int) -> bool:
    """Whether every stage of an empty engine has a lane for so many tokens."""
    need = blocks_of(tokens)
    for stage in range(engines.stages[e]):
        g = engines.stage_first[e] + stage
        fits = False
        for i in range(engines.lanes[g]):
            if engines.lane_blocks[engines.lane_first[g] + i] >= need:
                fits = True
        if not fits:
            return False
    return True


@compiled
def take_slot(engines: Engines, state: State, requests: Requests, e: int, r: int) -> int:
    """Give request r a slot and blocks for all its tokens so far; -1: no room now."""
    if state.free_slots[e] == 0:
        return -1
    known = requests.input_tokens[r] + requests.generated[r]
    whole = requests.input_tokens[r] + requests.output_tokens[r]
    need, most = blocks_of(known), blocks_of(whole)
    slot = state.free_slot[engines.slot_first[e] + state.free_slots[e] - 1]
    for stage in range(engines.stages[e]):
        lane = _best_lane(engines, state, engines.stage_first[e] + stage, need, most)
        if lane < 0:
            return -1
        state.slot_lane[slot, stage] = lane
    state.free_slots[e] -= 1
    state.slot_request[slot] = r
    state.slot_blocks[slot] = 0
    state.slot_steps[slot] = 0
    requests.slot[r] = slot
    for stage in range(engines.stages[e]):
        state.lane_used[state.slot_lane[slot, stage]] += 1
    grow(engines, state, e, slot, known)
    return slot


@compiled
def grow(engines: Engines, state: State, e: int, slot: int, tokens: int) -> bool:
    """Take the blocks that `tokens` need beyond those held; False: some lane has too few."""
    more = blocks_of(tokens) - state.slot_blocks[slot]
    if more <= 0:
        return True
    for stage in range(engines.stages[e]):
        if state.lane_free[state.slot_lane[slot, stage]] < more:
            return False
    for stage in range(engines.stages[e]):
        lane = state.slot_lane[slot, stage]
        state.lane_free[lane] -= more
        if state.lane_free[lane] < state.lane_least_free[lane]:
            state.lane_least_free[lane] = state.lane_free[lane]
    state.slot_blocks[slot] += more
    return True


@compiled
def give_back(engines: Engines, state: State, requests: Requests, e: int, slot: int) -> None:
    """Free a slot and its blocks."""
    for stage in range(engines.stages[e]):
        lane = state.slot_lane[slot, stage]
        state.lane_free[lane] += state.slot_blocks[slot]
        state.lane_used[lane] -= 1
    requests.slot[state.slot_request[slot]] = -1
    state.slot_request[slot] = -1
    state.slot_blocks[slot] = 0
    state.free_slot[engines.slot_first[e] + state.free_slots[e]] = slot
    state.free_slots[e] += 1


@compiled
def shares_full_lane(engines: Engines, state: State, e: int, slot: int, other: int) -> bool:
    """Whether giving `other` back would help `slot` to grow by a block."""
    for stage in range(engines.stages[e]):
        lane = state.slot_lane[slot, stage]
        if state.lane_free[lane] < 1 and state.slot_lane[other, stage] == lane:
            return True
    return False


@compiled
def _best_lane(engines: Engines, state: State, g: int, need: int, most: int) -> int:
    """The lane of least requests per weight that has room; -1: none."""
    best, least = -1, 0.0
    for i in range(engines.lanes[g]):
        lane = engines.lane_first[g] + i
        if state.lane_free[lane] < need or engines.lane_blocks[lane] < most:
            continue
        load = (state.lane_used[lane] + 1) / engines.lane_weight[lane]
        if best < 0 or load < least:
            best, least = lane, load
    return best

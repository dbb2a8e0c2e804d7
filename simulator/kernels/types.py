"""Records of arrays that the event loop works on. Times are in ms, KV in blocks of 16 tokens.

Indices: t step table, e engine, g stage of an engine, l lane (a tensor parallel group that takes a
share of a stage's requests), s slot (room for one request in an engine), w workload, r request.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from planner.perf.grids import Floats

Ints = NDArray[Any]

BLOCK_TOKENS = 16  # vLLM's default KV block on GPUs
MOST_STAGES = 32

PREFILL, DECODE, AGGREGATED = range(3)  # what an engine serves of a request
WAITING, DONE, LOST, TOO_LONG, FAILED = range(5)  # how a request ended; WAITING: it did not
READY, STEPPED, RECEIVED, STARTED, DRAINED, DIED, REPLANNED = range(7)  # events
HEAP_SIZE, SEQUENCE, ITERATIONS, SCHEDULED_TOKENS, PLAN = range(5)  # places in State.counters


class Tables(NamedTuple):
    """Milliseconds of one layer, all-reduce included, and of the head."""

    mixed_ms: Floats  # [t, tokens] linear part of a step with decodes and prompts
    prefill_ms: Floats  # [t, tokens] linear part of a step with prompts alone
    prompt_ms: Floats  # [t, tokens] attention of one whole prompt
    decode_ms: Floats  # [t, requests, context / context_step]
    attention_ms: Floats  # [t, requests, context / context_step] of decodes in a mixed step
    head_ms: Floats  # [t, requests]
    context_step: float  # tokens


class Engines(NamedTuple):
    """The fleet, as it never changes during a run."""

    phase: Ints  # [e]
    domain: Ints  # [e] KV moves inside one
    stage_first: Ints  # [e]
    stages: Ints  # [e]
    micro_batches: Ints  # [e] most in flight
    step_requests: Ints  # [e] most decodes in a micro-batch; prefill: prompts
    most_requests: Ints  # [e] running at once
    token_budget: Ints  # [e] new tokens in a micro-batch
    slot_first: Ints  # [e]
    slots: Ints  # [e]
    batch_first: Ints  # [e] its first place for micro-batches
    item_first: Ints  # [e] its first place for items of micro-batches
    hop_latency_ms: Floats  # [e]
    hop_ms_per_token: Floats  # [e]
    send_ms_per_token: Floats  # [e] KV of one prompt token, prefill side
    receive_ms_per_token: Floats  # [e] decode side
    lane_first: Ints  # [g]
    lanes: Ints  # [g]
    layers: Ints  # [g]
    has_head: Ints  # [g]
    lane_table: Ints  # [l]
    lane_overhead_ms: Floats  # [l]
    lane_blocks: Ints  # [l] KV
    lane_weight: Floats  # [l] its share of the stage's requests
    lane_budget: Ints  # [l] tokens of a micro-batch beyond which it takes no more of prompts


class Routes(NamedTuple):
    """Who may take a workload's requests, by what of them an engine serves.

    Weights are by plan, p; an engine of weight 0 takes nothing under that plan.
    """

    whole_first: Ints  # [w + 1] aggregated
    whole_engine: Ints  # [k], engines of a group together
    whole_group: Ints  # [k]
    whole_weight: Floats  # [p, k]
    prefill_first: Ints
    prefill_engine: Ints
    prefill_group: Ints
    prefill_weight: Floats
    decode_first: Ints
    decode_engine: Ints
    decode_group: Ints
    decode_weight: Floats


class Requests(NamedTuple):
    """The trace, and what became of each request; times are -1 until they happen."""

    arrival_ms: Floats
    workload: Ints
    input_tokens: Ints
    output_tokens: Ints
    status: Ints
    start_ms: Floats  # first scheduled anywhere
    handed_ms: Floats  # its prompt done at a prefill engine
    first_ms: Floats  # first token
    finish_ms: Floats
    engine: Ints  # the last one
    generated: Ints
    preemptions: Ints
    next: Ints  # in its engine's queue
    received: Ints  # 1: its prompt's KV came from a prefill engine
    slot: Ints  # while it runs
    target: Ints  # decode engine to which its KV moves; -1: none
    attempt: Ints  # raised when an engine dies under it


class State(NamedTuple):
    """Everything that changes."""

    up: Ints  # [e] takes new requests
    alive: Ints  # [e] works
    epoch: Ints  # [e] raised at death: later events of before are void
    waiting: Ints  # [e]
    queue_head: Ints  # [e]
    queue_tail: Ints  # [e]
    running: Ints  # [e]
    outstanding: Ints  # [e] routed here and not ended
    whole_sent: Ints  # [k] of the routes, since the plan or who is up last changed
    prefill_sent: Ints
    decode_sent: Ints
    in_flight: Ints  # [e] micro-batches
    ready_at: Floats  # [e] of its pending READY event; -1: none
    sender_free_ms: Floats  # [e]
    receiver_free_ms: Floats  # [e]
    busy_until: Floats  # [g]
    lane_free: Ints  # [l] blocks
    lane_least_free: Ints  # [l] over the run
    lane_used: Ints  # [l] requests
    lane_busy_ms: Floats  # [l]
    decodes: Ints  # [l] of the micro-batch being made
    context: Floats  # [l]
    tokens: Ints  # [l] of prompts
    prompt_ms: Floats  # [l] attention of one layer
    rows: Ints  # [l] of logits
    slot_request: Ints  # [s], -1: free
    slot_computed: Ints  # [s] tokens whose KV exists or is being computed
    slot_steps: Ints  # [s] micro-batches in flight that carry it
    slot_blocks: Ints  # [s]
    slot_lane: Ints  # [s, stage]
    order: Ints  # [s] slots of running requests by admission, from slot_first of the engine
    free_slot: Ints  # [s] stack, from slot_first of the engine
    free_slots: Ints  # [e]
    batch_items: Ints  # [batch place], 0: free
    item_slot: Ints
    item_emits: Ints  # 1: the step ends with a token of this request
    heap_ms: Floats
    heap_order: Ints
    heap_kind: Ints
    heap_a: Ints
    heap_b: Ints
    heap_c: Ints
    counters: Ints


class Events(NamedTuple):
    """What happens to engines, and new plans, by time."""

    at_ms: Floats
    kind: Ints
    number: Ints  # of the engine, or of the plan

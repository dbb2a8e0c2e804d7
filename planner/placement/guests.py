"""What a replica made for one workload serves of another: T[t, w] of shared replicas.

A replica has one engine configuration, that of its own workload (its *host*): M micro-batches,
b requests in each, a token budget per step (planner/engine.py). A guest gets what those limits
leave it. Stages, options and shares stay in proportion; with r = x / b its share of a full
micro-batch, x requests of the guest are in every micro-batch.
Source: docs/formulation.md, section 4, "Shared replicas".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.perf.grids import Floats
from planner.placement.profile import NodeOption, PhaseProblem
from planner.placement.stages import Role, handover_ms, hop_ms, network_ms
from planner.types import Combination, Phase, Placement, Stage, StageNode

LOADS = 64  # sizes of a guest's micro-batch that are tried, evenly up to the largest


@dataclass(frozen=True)
class _Times:
    """Of one stage, by the sizes tried."""

    step_ms: Floats
    latency_ms: Floats  # prefill: with one p95 prompt
    fits: np.ndarray[tuple[int], np.dtype[np.bool_]]


def guest_rps(
    guest: PhaseProblem, host: PhaseProblem, combination: Combination, placement: Placement
) -> float:
    """Requests/s of the guest's workload on a replica of the host's, before utilisation.

    0 where the guest's own objectives, memory or hand-over do not hold under the host's limits,
    or where it would slow the host's requests beyond theirs. A host is its own guest: then the
    answer is the placement's throughput.
    """
    terms, in_cycles = guest.terms, guest.phase.in_cycles
    if in_cycles and terms.budget_ms < host.terms.budget_ms * (1.0 - 1e-9):
        return 0.0  # host's steps may take longer than the guest's TPOT
    most = _largest_share(guest, host, placement)
    share = most * np.arange(1.0, LOADS + 1.0) / LOADS  # r
    size = share * placement.micro_batch_size  # x
    last = len(placement.stages) - 1
    stages = [
        _stage_times(guest, placement, stage, Role.at(index, last + 1), share)
        for index, stage in enumerate(placement.stages)
    ]
    hops = last * np.array([hop_ms(guest, combination, float(x)) for x in size])
    slowest = np.maximum.reduce([stage.step_ms for stage in stages])
    fits = np.logical_and.reduce([stage.fits for stage in stages])
    if in_cycles:
        summed = np.add.reduce([stage.step_ms for stage in stages]) + hops
        cycle = np.maximum(summed, placement.micro_batches * slowest)
        fits &= cycle <= _longest_cycle_ms(guest, host, placement, share) * (1.0 + 1e-9)
        rps = placement.micro_batches * size * 1e3 / (terms.tokens_per_cycle * cycle)
    else:
        latency = np.add.reduce([stage.latency_ms for stage in stages]) + hops
        latency = latency + (_steps_of_p95_prompt(guest, host, placement) - 1) * slowest
        fits &= latency <= terms.budget_ms * (1.0 + 1e-9)
        rps = size * 1e3 / slowest
    largest = np.flatnonzero(fits)[-1:]  # the engine stops at its own limits, not at the best size
    return float(rps[largest].sum())


def _largest_share(guest: PhaseProblem, host: PhaseProblem, placement: Placement) -> float:
    """Most requests of the guest in a step over b: the host's token budget, and at most b."""
    mine, theirs = host.terms, guest.terms
    match guest.phase:
        case Phase.DECODE:
            return 1.0
        case Phase.AGGREGATED:  # b + b p / o tokens a step
            return min(1.0, (1.0 + mine.chunk_tokens) / (1.0 + theirs.chunk_tokens))
        case Phase.PREFILL:  # a group's prompts whole, one of them of p95 length
            budgets = [
                ((group - 1) * mine.hop_tokens + mine.p95_input) / (group * theirs.hop_tokens)
                for stage in placement.stages
                for group in (_group(node) for node in stage.nodes)
            ]
            return min(1.0, *budgets)


def _steps_of_p95_prompt(guest: PhaseProblem, host: PhaseProblem, placement: Placement) -> int:
    """Prefill: steps that a p95 prompt of the guest needs under the host's token budget."""
    smallest = min(_group(node) for stage in placement.stages for node in stage.nodes)
    budget = (smallest - 1) * host.terms.hop_tokens + host.terms.p95_input
    return math.ceil(guest.terms.p95_input / budget - 1e-9)


def _longest_cycle_ms(
    guest: PhaseProblem, host: PhaseProblem, placement: Placement, share: Floats
) -> Floats:
    """P5 of the guest's objectives, and the host's TPOT: both wait for the same steps."""
    terms = guest.terms
    limit = np.full(share.shape, min(terms.budget_ms, host.terms.budget_ms))
    if guest.phase is Phase.AGGREGATED:
        groups = [
            node.batch // node.data_parallel_size for s in placement.stages for node in s.nodes
        ]
        chunk = np.maximum(min(groups) * share * terms.chunk_tokens, 1e-9)
        limit = np.minimum(limit, terms.chunks_budget_ms / np.ceil(terms.p95_input / chunk))
    return limit


def _stage_times(
    problem: PhaseProblem, placement: Placement, stage: Stage, role: Role, share: Floats
) -> _Times:
    parts = [_node_times(problem, placement, stage, node, role, share) for node in stage.nodes]
    return _Times(
        np.maximum.reduce([part.step_ms for part in parts]),
        np.maximum.reduce([part.latency_ms for part in parts]),
        np.logical_and.reduce([part.fits for part in parts]),
    )


def _node_times(
    problem: PhaseProblem,
    placement: Placement,
    stage: Stage,
    node: StageNode,
    role: Role,
    share: Floats,
) -> _Times:
    """One node's, with its groups' requests between whole numbers; below one, of one."""
    terms, profile = problem.terms, problem.nodes[node.node_class]
    option = next(
        o
        for o in profile.options
        if (o.tp, o.dp) == (node.tensor_parallel_size, node.data_parallel_size)
    )
    requests = _group(node) * share
    once = option.overhead_ms + (_at(option.head_ms, requests) if role.is_last else 0.0)
    step = stage.layers * _at(option.layer_ms, requests) + once
    latency = stage.layers * _at(option.latency_layer_ms, requests) + once
    batch = node.batch * share
    step = np.maximum(step, network_ms(problem, profile, role, stage.layers, batch))
    fits = _held(option, problem, stage, role, placement.micro_batches * requests)
    fits &= handover_ms(problem, profile, stage.layers, batch) <= terms.handover_ms * (1.0 + 1e-9)
    return _Times(step, latency, fits)


def _held(
    option: NodeOption, problem: PhaseProblem, stage: Stage, role: Role, in_flight: Floats
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """P4 of one group."""
    room = option.kv_room_bytes(stage.layers, first=role.is_first, last=role.is_last)
    tokens = in_flight * problem.terms.kv_tokens + problem.terms.kv_tokens_extra
    return np.asarray(tokens * option.kv_bytes * stage.layers <= room * (1.0 + 1e-9))


def _group(node: StageNode) -> int:
    """Requests of a micro-batch in the largest group of a node."""
    return -(-node.batch // node.data_parallel_size)


def _at(by_batch: Floats, requests: Floats) -> Floats:
    return np.interp(requests, np.arange(1.0, by_batch.size + 1.0), by_batch)

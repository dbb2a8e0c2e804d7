"""What a replica made for one workload serves of another: T[t, w] of shared replicas.

A replica has one engine configuration, that of its own workload (its *host*): M micro-batches,
b requests in each, a token budget per step (planner/engine.py). A guest gets what those limits
leave it. Stages, options and shares stay in proportion; with r = x / b its share of a full
micro-batch, x requests of the guest are in every micro-batch.
Source: docs/formulation.md, section 4, "Shared replicas".
"""

from __future__ import annotations

import math

import numpy as np

from planner.perf.grids import Floats
from planner.placement.loads import at_load, group_of
from planner.placement.profile import PhaseProblem
from planner.types import Combination, Phase, Placement

LOADS = 64  # sizes of a guest's micro-batch that are tried, evenly up to the largest


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
    times = at_load(guest, combination, placement, share)
    fits = times.fits
    if in_cycles:
        cycle = times.cycle_ms(placement.micro_batches)
        fits = fits & (cycle <= _longest_cycle_ms(guest, host, placement, share) * (1.0 + 1e-9))
        rps = placement.micro_batches * size * 1e3 / (terms.tokens_per_cycle * cycle)
    else:
        more = (_steps_of_p95_prompt(guest, host, placement) - 1) * times.slowest_ms
        fits = fits & (times.latency_ms + more <= terms.budget_ms * (1.0 + 1e-9))
        rps = size * 1e3 / times.slowest_ms
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
                for group in (group_of(node) for node in stage.nodes)
            ]
            return min(1.0, *budgets)


def _steps_of_p95_prompt(guest: PhaseProblem, host: PhaseProblem, placement: Placement) -> int:
    """Prefill: steps that a p95 prompt of the guest needs under the host's token budget."""
    smallest = min(group_of(node) for stage in placement.stages for node in stage.nodes)
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

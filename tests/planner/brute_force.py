"""Placement by trying everything, written from docs/formulation.md and nothing else.

Shares only the input records with the product: its own memory, step, hop and cycle arithmetic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from planner.placement.profile import NodeOption, NodeProfile, PhaseProblem
from planner.types import Combination, Phase


def best_rps(problem: PhaseProblem, combination: Combination) -> float:
    """Highest throughput before utilisation, 0 when nothing meets the SLO."""
    names = [name for name, count in combination for _ in range(count)]
    cycles = problem.phase is not Phase.PREFILL
    counts = range(1, len(names) + 1) if cycles else [max(1, 8 * (len(names) - 1))]
    best = 0.0
    for stages in _ordered_partitions(names):
        for layers in _compositions(problem.terms.layers, len(stages)):
            for m, b in itertools.product(counts, problem.batch_sizes):
                best = max(best, _rps(problem, combination, stages, layers, m, b))
    return best


def _rps(problem, combination, stages, layers, m, b) -> float:
    terms, cycles = problem.terms, problem.phase is not Phase.PREFILL
    choices = []
    for index, (names, count) in enumerate(zip(stages, layers, strict=True)):
        ends = (index == 0, index == len(stages) - 1)
        choices.append(_stage_choices(problem, names, count, ends, m, b))
    slowest_network = min(problem.nodes[n].network_peak_gbit_per_s for n, _ in combination)
    tokens = b * terms.hop_tokens + terms.hop_tokens_extra
    per_byte = terms.hop_ms_per_byte + 8 / (slowest_network * 1e6)
    hop = terms.hop_latency_ms + tokens * terms.hop_bytes_per_token * per_byte
    best = 0.0
    for picked in itertools.product(*choices):
        total = sum(latency for _, latency, _ in picked) + hop * (len(stages) - 1)
        slowest = max(step for step, _, _ in picked)
        if cycles:
            cycle = max(total, m * slowest)
            if cycle <= terms.budget_ms and _chunks_fit(terms, cycle, min(p[2] for p in picked)):
                best = max(best, m * b * 1000 / (terms.tokens_per_cycle * cycle))
        elif total <= terms.budget_ms:
            best = max(best, b * 1000 / slowest)
    return best


def _chunks_fit(terms, cycle: float, share: int) -> bool:
    """Aggregated: a p95 prompt goes through in chunks, one per cycle."""
    if terms.phase is not Phase.AGGREGATED:
        return True
    if share == 0:
        return False
    chunks = math.ceil(terms.p95_input / (terms.chunk_tokens * share))
    return chunks * cycle <= terms.chunks_budget_ms


def _stage_choices(problem, names, layers, ends, m, b) -> list[tuple[float, float, int]]:
    """(step, latency, least group share) of every choice of options and split."""
    found = []
    options = [range(len(problem.nodes[name].options)) for name in names]
    for indices in itertools.product(*options):
        order = sorted(zip(names, indices, strict=True))
        if list(zip(names, indices, strict=True)) != order:
            continue  # equal nodes: the same choice in another order
        chosen = [problem.nodes[name].options[index] for name, index in order]
        for shares in itertools.product(range(b + 1), repeat=len(names)):
            if sum(shares) != b:
                continue
            times = [
                _node(problem, problem.nodes[name], option, layers, share, ends, m)
                for name, option, share in zip(names, chosen, shares, strict=True)
                if share
            ]
            least = min(x // o.dp for x, o in zip(shares, chosen, strict=True) if x)
            step, latency = max(t[0] for t in times), max(t[1] for t in times)
            if math.isfinite(step):
                found.append((step, latency, least))
    return found


def _node(
    problem: PhaseProblem,
    node: NodeProfile,
    option: NodeOption,
    layers: int,
    share: int,
    ends: tuple[bool, bool],
    m: int,
) -> tuple[float, float]:
    terms = problem.terms
    group = math.ceil(share / option.dp)
    weights = layers * option.layer_bytes
    if ends[0]:
        weights += option.embed_bytes
    if ends[1]:
        weights += option.lm_head_bytes
    kv = (m * group * terms.kv_tokens + terms.kv_tokens_extra) * layers * option.kv_bytes
    prefill = problem.phase is Phase.PREFILL
    handed = terms.p95_prompt_kv_bytes_per_layer
    if prefill:
        handed += (share - 1) * terms.prompt_kv_bytes_per_layer
    moved_ms = layers * handed * 8 / (node.network_peak_gbit_per_s * 1e6)
    if weights + kv > option.free_bytes or moved_ms > terms.handover_ms:
        return math.inf, math.inf
    head = option.overhead_ms + (option.head_ms[group - 1] if ends[1] else 0.0)
    step = layers * option.layer_ms[group - 1] + head
    kv_bytes = share / terms.tokens_per_cycle * layers * terms.prompt_kv_bytes_per_layer
    hop_bytes = share * terms.hop_tokens * terms.hop_bytes_per_token
    received = (0 if ends[0] else hop_bytes) + (0 if prefill else kv_bytes)
    sent = (0 if ends[1] else hop_bytes) + (kv_bytes if prefill else 0)
    step = max(step, 8 * max(received, sent) / (node.network_baseline_gbit_per_s * 1e6))
    latency = layers * option.latency_layer_ms[group - 1] + head
    return float(step), float(latency if problem.phase is Phase.PREFILL else step)


def _ordered_partitions(names: list[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to put some of the nodes on an ordered list of stages."""
    seen = set()
    for stage_of in itertools.product(range(len(names) + 1), repeat=len(names)):
        used = sorted({s for s in stage_of if s})
        if used != list(range(1, len(used) + 1)) or not used:
            continue
        stages = tuple(
            tuple(sorted(n for n, s in zip(names, stage_of, strict=True) if s == k)) for k in used
        )
        if stages not in seen:
            seen.add(stages)
            yield stages


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))

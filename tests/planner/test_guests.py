"""T[t, w] of shared replicas: the guest's rate under the host's limits, within both objectives."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner.placement.evaluate import PlacementCheckError, evaluate
from planner.placement.guests import LOADS, guest_rps
from planner.placement.profile import PhaseProblem
from planner.placement.search import best_placement
from planner.placement.stages import StageTable
from planner.types import Combination, Phase, Placement, Stage
from tests.builders import random_problem
from tests.planner.test_placement import combinations_of

Found = tuple[PhaseProblem, Combination, Placement]


def placements(phase: Phase, most_nodes: int = 2) -> list[Found]:
    found = []
    for seed in range(6 * (3 - most_nodes)):
        problem = random_problem(seed, phase)
        table = StageTable(problem)
        for combination in combinations_of(problem, most_nodes):
            placement = best_placement(table, combination).placement
            if placement:
                found.append((problem, combination, placement))
    assert len(found) > 8
    return found


def with_terms(problem: PhaseProblem, **terms: float) -> PhaseProblem:
    return replace(problem, terms=replace(problem.terms, **terms))


@pytest.mark.parametrize("phase", list(Phase))
def test_a_host_is_its_own_guest(phase: Phase) -> None:
    for problem, combination, placement in placements(phase):
        own = guest_rps(problem, problem, combination, placement)
        assert own == pytest.approx(placement.raw_rps, rel=1e-6)


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.AGGREGATED])
def test_no_guest_whose_steps_must_be_shorter_than_the_hosts_may_be(phase: Phase) -> None:
    for problem, combination, placement in placements(phase):
        strict = with_terms(problem, budget_ms=0.99 * problem.terms.budget_ms)
        assert guest_rps(strict, problem, combination, placement) == 0.0
        assert guest_rps(problem, strict, combination, placement) >= 0.0


def test_a_guest_never_has_more_than_b_in_a_micro_batch() -> None:
    """Half as long outputs: the same requests in flight, twice the rate, no more than that."""
    for problem, combination, placement in placements(Phase.DECODE):
        outputs = problem.terms.tokens_per_cycle
        short = with_terms(problem, tokens_per_cycle=outputs / 2, kv_tokens=1.0,
                           prompt_kv_bytes_per_layer=0.0)  # fmt: skip
        rate = guest_rps(short, problem, combination, placement)
        assert placement.raw_rps * (2 - 1e-6) <= rate
        in_flight = placement.micro_batches * placement.micro_batch_size
        shortest = in_flight * 1e3 / (outputs / 2 * rate)
        assert shortest <= placement.cycle_ms * (1 + 1e-6)


def test_a_guest_stops_where_its_own_memory_does() -> None:
    """Against `evaluate` of every smaller micro-batch on one node of one group."""
    compared = 0
    for problem, combination, placement in placements(Phase.DECODE, 1):
        (stage,) = placement.stages
        (node,) = stage.nodes
        if node.data_parallel_size > 1 or placement.micro_batch_size < 2:
            continue
        long = with_terms(problem, kv_tokens=2.1 * problem.terms.kv_tokens)
        held = []
        for size in range(1, placement.micro_batch_size + 1):
            part = Stage(0, stage.layers, (replace(node, batch=size),))
            draft = replace(placement, stages=(part,), micro_batch_size=size)
            try:
                held.append(evaluate(long, combination, draft).raw_rps)
            except PlacementCheckError:
                break
        rate = guest_rps(long, problem, combination, placement)
        if held and len(held) < placement.micro_batch_size:
            step = placement.micro_batch_size / LOADS
            assert rate >= held[-1] * (1.0 - step / len(held))
            assert rate <= held[-1] * (len(held) + 1.0) / len(held)
            compared += 1
    assert compared >= 3


def test_long_prompts_get_what_the_token_budget_leaves() -> None:
    """Twice the new tokens per decode: of 1 + 2 tokens a place, 1 / (1 + 4) of the budget."""
    for problem, combination, placement in placements(Phase.AGGREGATED):
        heavy = with_terms(problem, chunk_tokens=4.0, chunks_budget_ms=math.inf)
        rate = guest_rps(heavy, problem, combination, placement)
        most = placement.micro_batches * placement.micro_batch_size * 3.0 / 5.0
        if rate:
            cycle = most * 1e3 / (problem.terms.tokens_per_cycle * rate)
            assert cycle <= placement.cycle_ms * (1 + 1e-6)


def test_a_p95_prompt_in_several_steps_waits_for_them() -> None:
    served = refused = 0
    for problem, combination, placement in placements(Phase.PREFILL):
        smallest = min(
            -(-n.batch // n.data_parallel_size) for s in placement.stages for n in s.nodes
        )
        budget = (smallest - 1) * 3.0 + 9.0
        long = with_terms(problem, p95_input=3.5 * budget, budget_ms=1e9)
        free = guest_rps(long, problem, combination, placement)
        served += free > 0
        short = placement.latency_ms + 2.9 * placement.cycle_ms
        refused += guest_rps(with_terms(long, budget_ms=short), problem, combination,
                             placement) < free  # fmt: skip
    assert served > 10 and refused > 0

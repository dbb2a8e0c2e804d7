"""The pruned library against the full one on random markets (docs/formulation.md, section 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, AllocationSettings
from planner.allocation.solve import plan_allocation
from planner.placement.combinations import (
    CombinationSet,
    Members,
    SplitFloors,
    enumerate_combinations,
)
from planner.placement.evaluate import make_template
from planner.placement.exact import ExactSolver
from planner.placement.profile import PhaseProblem
from planner.placement.settings import RELATIVE_TOLERANCE
from planner.placement.solution import Outcome, Solved
from planner.types import Market, Offer, Phase, Template
from tests.builders import offer, random_problem, workload

GAP = 1e-6
SOLVED = AllocationSettings(relative_gap=GAP, deadline_s=60.0)
MAX_NODES = 3


def problem_of(seed: int, phase: Phase, least_gain: float) -> PhaseProblem:
    """A random phase whose classes have the same names in every phase."""
    problem = random_problem(seed, phase, layers=4)
    nodes = {
        f"N{index} x1": replace(profile, name=f"N{index} x1")
        for index, (_, profile) in enumerate(sorted(problem.nodes.items()))
    }
    return replace(problem, workload="chat", nodes=nodes, least_gain=least_gain)


def solve_levels(
    problem: PhaseProblem, *, pruned: bool
) -> Iterator[tuple[CombinationSet, Members, Solved]]:
    """Every size in turn, with the floors of the smaller ones or none."""
    combinations = enumerate_combinations(problem, MAX_NODES, 1e9)
    solver = ExactSolver(problem, MAX_NODES)
    floors = SplitFloors(len(problem.names), MAX_NODES)
    for members in combinations.by_size:
        least = floors.floors(members) if pruned else np.zeros(len(members))
        solved = solver.solve(members, least)
        floors.record(members, solved.best_rps)
        yield combinations, members, solved


def library(problem: PhaseProblem, *, pruned: bool) -> list[Template]:
    """Templates of all combinations, or of those that beat their parts."""
    return [
        make_template(problem, combinations.combination(members[row]), placement)
        for combinations, members, solved in solve_levels(problem, pruned=pruned)
        for row, placement in solved.placements.items()
    ]


def phases_of(seed: int) -> tuple[Phase, ...]:
    return ((Phase.PREFILL, Phase.DECODE), (Phase.AGGREGATED,))[seed % 2]


def demand_of(seed: int, templates: list[Template]) -> float:
    """From a third of one strong replica to nine of them."""
    strongest = min(
        max(t.throughput_rps for t in templates if t.phase is phase) for phase in phases_of(seed)
    )
    return strongest * float(np.random.default_rng(1000 + seed).uniform(0.3, 9.0))


def random_market(seed: int) -> tuple[list[Offer], dict[tuple[str, str, Market], int]]:
    """Two domains, both markets, some scarce; and nodes that already run."""
    rng = np.random.default_rng(seed)
    offers, held = [], {}
    for domain in ("d1", "d2"):
        for index in range(3):
            name = f"N{index} x1"
            stock = int(rng.choice([0, 1, 2, 3, 8]))
            price = float(rng.uniform(1.0, 10.0))
            offers.append(offer(domain, name, price, stock))
            if rng.random() < 0.5:
                offers.append(offer(domain, name, price * 0.4, stock, Market.SPOT))
            if stock and rng.random() < 0.3:
                held[domain, f"type-{name}", Market.ON_DEMAND] = 1
    return offers, held


def plan(templates, demand_rps: float, seed: int) -> Plan:
    offers, held = random_market(seed)
    data = AllocationInput.of(
        [workload(demand_rps=demand_rps)], templates, offers, held=held, settings=SOLVED
    )
    return plan_allocation(data)


@pytest.mark.parametrize("seed", range(50))
def test_the_pruned_library_loses_at_most_its_tolerance(seed: int) -> None:
    least_gain = (1e-4, 0.02, 0.1)[seed % 3]
    phases = phases_of(seed)
    problems = [problem_of(seed, phase, least_gain) for phase in phases]
    full = [t for p in problems for t in library(p, pruned=False)]
    kept = [t for p in problems for t in library(p, pruned=True)]
    if {t.phase for t in full} != set(phases):
        pytest.skip("a phase without any template: no market to plan for")
    assert len(kept) < len(full)
    assert {t.phase for t in kept} == set(phases)
    demand = demand_of(seed, full)
    complete = plan(full, demand, seed)
    # What serves a demand with the full library serves 1 / (1 + eps) of it, at no more cost.
    eps = (1.0 + least_gain) * (1.0 + 2.0 * RELATIVE_TOLERANCE) - 1.0
    served = complete.served_share * demand
    lossy = plan(kept, served / (1.0 + eps), seed)
    assert lossy.served_share == pytest.approx(1.0, abs=1e-6)
    assert lossy.objective_usd <= complete.objective_usd * (1.0 + 1e-4) + 1e-6


def test_scarce_markets_are_among_them() -> None:
    """The comparison above would prove little if stock never ran out."""
    short = 0
    for seed in range(0, 50, 3):
        phases = phases_of(seed)
        templates = [t for p in phases for t in library(problem_of(seed, p, 1e-4), pruned=True)]
        if {t.phase for t in templates} == set(phases):
            short += plan(templates, demand_of(seed, templates), seed).served_share < 0.999
    assert short >= 3


def test_dropped_combinations_are_counted_by_reason() -> None:
    reasons: set[Outcome] = set()
    for seed in range(12):
        for phase in Phase:
            problem = problem_of(seed, phase, 1e-4)
            for _, members, solved in solve_levels(problem, pruned=True):
                assert len(solved.outcomes) == len(members)
                kept = [row for row, o in enumerate(solved.outcomes) if o is Outcome.KEPT]
                assert kept == sorted(solved.placements)
                for row, outcome in enumerate(solved.outcomes):
                    if outcome in {Outcome.BOUND_WORK, Outcome.BOUND_LAYERS, Outcome.BOUND_LATENCY}:
                        assert solved.searches[row] == 0
                reasons.update(solved.outcomes)
    assert reasons == set(Outcome)

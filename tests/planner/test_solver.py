"""What the one solver module promises."""

from __future__ import annotations

import pulp
import pytest

from planner.errors import InfeasiblePlanError, SolverStoppedError
from planner.placement.combinations import enumerate_combinations
from planner.placement.search import best_placement
from planner.placement.stages import StageTable
from planner.solver import Outcome, require_feasible, solve
from planner.types import Phase
from tests.builders import random_problem


def knapsack(items: int = 40) -> pulp.LpProblem:
    problem = pulp.LpProblem("knapsack", pulp.LpMinimize)
    chosen = [pulp.LpVariable(f"x_{i}", 0, 1, pulp.LpInteger) for i in range(items)]
    problem += pulp.lpSum(-(1.0 + (37 * i % 11) / 7.3) * x for i, x in enumerate(chosen))
    for row in range(6):
        weights = [1.0 + (i * (row + 3) * 29) % 17 for i in range(items)]
        problem += pulp.lpDot(weights, chosen) <= sum(weights) / 3.1
    return problem


def test_an_optimum_is_proven_with_its_bound() -> None:
    report = solve(knapsack())
    assert report.outcome is Outcome.PROVEN
    assert report.gap < 1e-4
    assert report.bound <= report.objective + 1e-6


def test_a_deadline_gives_an_incumbent_with_its_gap_never_a_proof() -> None:
    report = solve(knapsack(400), time_limit_s=0.3, relative_gap=0.0)
    assert report.outcome is Outcome.INCUMBENT
    assert report.gap > 0.0


def test_infeasible_is_an_outcome_and_an_error_where_it_cannot_be() -> None:
    problem = pulp.LpProblem("none", pulp.LpMinimize)
    x = pulp.LpVariable("x", 0, 1, pulp.LpInteger)
    problem += x
    problem += x >= 2
    report = solve(problem)
    assert report.outcome is Outcome.INFEASIBLE
    with pytest.raises(InfeasiblePlanError, match="none"):
        require_feasible(problem, report)


def test_no_solution_before_the_deadline_is_an_error_not_an_empty_plan() -> None:
    problem = knapsack(3000)
    problem += pulp.lpSum(problem.variables()) == 937
    with pytest.raises(SolverStoppedError, match="time limit"):
        solve(problem, time_limit_s=1e-6)


def test_a_program_on_which_presolve_fails_is_solved_without_it() -> None:
    """HiGHS 1.15 ends one placement program of this problem with a solve error."""
    problem = random_problem(229, Phase.AGGREGATED, layers=6, classes=2)
    table = StageTable(problem)
    for combination in enumerate_combinations(problem, 2, 1e9):
        assert best_placement(table, combination).proven

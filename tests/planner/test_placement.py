"""Placement against brute force, and its recheck against broken placements."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from planner.placement.combinations import (
    SplitFloors,
    count_multisets,
    enumerate_combinations,
    members_of,
    sub_multisets,
)
from planner.placement.evaluate import PlacementCheckError, evaluate, make_template
from planner.placement.exact import ExactSolver
from planner.placement.latency import least_latency_ms
from planner.placement.search import IlpSolver, best_placement
from planner.placement.settings import RELATIVE_TOLERANCE
from planner.placement.stages import StageTable
from planner.types import Phase, Stage, combination_of
from tests.builders import random_problem
from tests.planner.brute_force import best_rps


def combinations_of(problem, max_nodes):
    return list(enumerate_combinations(problem, max_nodes, 1e9))


def solver_of(kind: str, problem, max_nodes: int = 3):
    return ExactSolver(problem, max_nodes) if kind == "exact" else IlpSolver(problem)


def solve_one(solver, combination, floor_rps: float = 0.0):
    """The placement that a solver finds for one combination, or None."""
    members = members_of(solver.problem.names, combination)
    return solver.solve(members, np.array([floor_rps])).placements.get(0)


@pytest.mark.parametrize("kind", ["exact", "ilp"])
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("seed", range(12))
def test_best_placement_matches_brute_force_on_pairs(seed: int, phase: Phase, kind: str) -> None:
    problem = random_problem(seed, phase)
    solver = solver_of(kind, problem)
    for combination in combinations_of(problem, 2):
        expected = best_rps(problem, combination)
        placement = solve_one(solver, combination)
        if expected == 0:
            assert placement is None
        else:
            assert placement is not None
            assert placement.raw_rps == pytest.approx(expected, rel=2 * RELATIVE_TOLERANCE)
            assert placement.raw_rps <= expected * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["exact", "ilp"])
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("seed", range(20, 30))
def test_best_placement_matches_brute_force_on_three_nodes(
    seed: int, phase: Phase, kind: str
) -> None:
    problem = random_problem(seed, phase, layers=4, classes=2)
    problem = replace(problem, batch_sizes=(1, 3))
    solver = solver_of(kind, problem)
    names = sorted(problem.nodes)
    for counts in ({names[0]: 3}, {names[0]: 2, names[1]: 1}, {names[0]: 1, names[1]: 2}):
        combination = combination_of(counts)
        expected = best_rps(problem, combination)
        placement = solve_one(solver, combination)
        assert (placement.raw_rps if placement else 0.0) == pytest.approx(
            expected, rel=2 * RELATIVE_TOLERANCE
        )


@pytest.mark.parametrize("kind", ["exact", "ilp"])
@pytest.mark.parametrize("phase", list(Phase))
def test_micro_batches_smaller_than_a_node_has_groups(phase: Phase, kind: str) -> None:
    """8 x TP1 may serve two prompts: six of its groups are idle."""
    reached = 0
    for seed in range(6):
        problem = random_problem(seed, phase, 4, 2, batches=(1, 2), gpu_counts=(1, 8))
        nodes = {n: replace(p, options=p.options[:1]) for n, p in problem.nodes.items()}
        problem = replace(problem, nodes=nodes)  # 8 x TP1 and nothing else
        solver = solver_of(kind, problem)
        for combination in combinations_of(problem, 2):
            expected = best_rps(problem, combination)
            placement = solve_one(solver, combination)
            found = placement.raw_rps if placement else 0.0
            assert found == pytest.approx(expected, rel=2 * RELATIVE_TOLERANCE)
            shapes = [n for s in placement.stages for n in s.nodes] if placement else []
            reached += any(n.data_parallel_size > n.batch for n in shapes)
    assert reached > 0 or phase is Phase.AGGREGATED  # there every group at work has a request


@pytest.mark.parametrize("phase", list(Phase))
def test_no_bound_hides_what_is_just_above_the_floor(phase: Phase) -> None:
    """A floor just under the optimum must leave it: bounds are tight there."""
    found = 0
    for seed in range(8):
        problem = random_problem(seed, phase, 6, 4, batches=(1, 2, 5, 8, 13), gpu_counts=(1, 2, 8))
        solver = ExactSolver(problem, 4)
        for members in enumerate_combinations(problem, 4, 1e9).by_size:
            free = solver.solve(members, np.zeros(len(members)))
            again = solver.solve(members, free.best_rps * (1.0 - 3e-4))
            assert again.best_rps == pytest.approx(free.best_rps, rel=2 * RELATIVE_TOLERANCE)
            assert again.placements.keys() == free.placements.keys()
            found += len(free.placements)
            none = solver.solve(members, free.best_rps * (1.0 + 2e-4))
            assert not [row for row in none.placements if free.best_rps[row] > 0]
    assert found > 100


def test_brute_force_cases_include_pipelines_and_data_parallel_stages() -> None:
    """The comparison above would prove little if every optimum were a single node."""
    shapes = set()
    for phase in Phase:
        for seed in range(6):
            problem = random_problem(seed, phase)
            table = StageTable(problem)
            for combination in combinations_of(problem, 2):
                placement = best_placement(table, combination).placement
                if placement:
                    widest = max(len(stage.nodes) for stage in placement.stages)
                    shapes.add((len(placement.stages), widest))
    assert {(1, 1), (1, 2), (2, 1)} <= shapes


@pytest.mark.parametrize("kind", ["exact", "ilp"])
@pytest.mark.parametrize("phase", list(Phase))
def test_a_floor_hides_what_does_not_beat_it(phase: Phase, kind: str) -> None:
    problem = random_problem(3, phase)
    solver = solver_of(kind, problem)
    for combination in combinations_of(problem, 2):
        free = solve_one(solver, combination)
        if free is None:
            continue
        assert solve_one(solver, combination, free.raw_rps) is None
        below = solve_one(solver, combination, free.raw_rps * 0.99)
        assert below is not None
        assert below.raw_rps == pytest.approx(free.raw_rps, rel=2 * RELATIVE_TOLERANCE)


@pytest.mark.parametrize("kind", ["exact", "ilp"])
@pytest.mark.parametrize("phase", list(Phase))
def test_every_placement_survives_the_recheck(phase: Phase, kind: str) -> None:
    checked = 0
    for seed in range(8):
        problem = random_problem(seed, phase)
        solver = solver_of(kind, problem)
        for combination in combinations_of(problem, 2):
            placement = solve_one(solver, combination)
            if placement:
                template = make_template(problem, combination, placement)
                assert template.throughput_rps == pytest.approx(placement.raw_rps * 0.9)
                checked += 1
    assert checked > 10


def some_pipeline(phase=Phase.DECODE):
    for seed in range(30):
        problem = random_problem(seed, phase)
        table = StageTable(problem)
        for combination in combinations_of(problem, 2):
            placement = best_placement(table, combination).placement
            if placement and len(placement.stages) == 2:
                return problem, combination, placement
    raise AssertionError("no pipeline among the random problems")


def test_recheck_refuses_what_breaks_a_constraint() -> None:
    problem, combination, placement = some_pipeline()
    first, second = placement.stages
    with pytest.raises(PlacementCheckError, match="contiguous"):
        gap = replace(second, first_layer=second.first_layer + 1)
        evaluate(problem, combination, replace(placement, stages=(first, gap)))
    with pytest.raises(PlacementCheckError, match="layers placed"):
        evaluate(problem, combination, replace(placement, stages=(first,)))
    with pytest.raises(PlacementCheckError, match="does not have"):
        twice = replace(second, nodes=second.nodes + first.nodes)
        evaluate(problem, combination, replace(placement, stages=(first, twice)))
    with pytest.raises(PlacementCheckError, match="less than its micro-batch"):
        more = replace(placement, micro_batch_size=placement.micro_batch_size + 1)
        evaluate(problem, combination, more)
    with pytest.raises(PlacementCheckError, match=r"memory|budget"):
        evaluate(problem, combination, replace(placement, micro_batches=500))
    with pytest.raises(PlacementCheckError, match="recheck"):
        make_template(problem, combination, replace(placement, raw_rps=placement.raw_rps * 1.1))
    tight = replace(problem, terms=replace(problem.terms, budget_ms=placement.latency_ms * 0.99))
    with pytest.raises(PlacementCheckError, match="budget"):
        evaluate(tight, combination, placement)
    slow = replace(problem, terms=replace(problem.terms, handover_ms=1e-6))
    with pytest.raises(PlacementCheckError, match="hands its KV over"):
        evaluate(slow, combination, placement)


def test_describe_names_nodes_layers_and_groups() -> None:
    _, _, placement = some_pipeline()
    text = placement.describe()
    assert text.count("->") == 1
    assert "| layers 0-" in text
    last = placement.stages[-1]
    assert text.endswith(f"{last.first_layer}-{last.first_layer + last.layers - 1}]")


def test_enumeration_keeps_rho_and_exempts_single_nodes() -> None:
    problem = random_problem(0, Phase.DECODE)
    gib = problem.terms.model_bytes / 2**30
    names = sorted(problem.nodes)
    sizes = dict(zip(names, (0.5 * gib, 3 * gib, 20 * gib), strict=True))
    nodes = {n: replace(problem.nodes[n], memory_gib=sizes[n]) for n in names}
    found = enumerate_combinations(replace(problem, nodes=nodes), 2, 6.0)
    small, middle, large = names
    assert set(found) == {
        combination_of({middle: 1}),
        combination_of({large: 1}),  # above rho, but a single node
        combination_of({small: 2}),
        combination_of({small: 1, middle: 1}),
        combination_of({middle: 2}),
    }
    assert sum(found.left_out.values()) + len(found) == count_multisets(3, 2)


def test_split_floor_is_the_best_pair_of_parts() -> None:
    floors = SplitFloors(classes=2, max_nodes=3)
    floors.record(np.array([[0], [1]], dtype=np.uint8), np.array([2.0, 3.0]))
    pairs = np.array([[0, 0], [0, 1], [1, 1]], dtype=np.uint8)
    assert floors.floors(pairs).tolist() == [4.0, 5.0, 6.0]
    floors.record(pairs, np.array([4.5, 7.0, 6.0]))
    triples = np.array([[0, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=np.uint8)
    assert floors.floors(triples).tolist() == [9.0, 6.5, 9.0]  # AB + A; AA + A; BB + B
    assert floors.floors(np.array([[0]], dtype=np.uint8)).tolist() == [0.0]
    assert len(list(sub_multisets(combination_of({"A": 2, "B": 1})))) == 5


@pytest.mark.parametrize("phase", list(Phase))
def test_least_latency_is_where_the_slo_becomes_possible(phase: Phase) -> None:
    reached = 0
    for seed in range(6):
        problem = random_problem(seed, phase)
        combinations = enumerate_combinations(problem, 2, 1e9)
        least = least_latency_ms(problem, combinations)

        def feasible(budget_ms: float, problem=problem, combinations=combinations) -> bool:
            terms = replace(problem.terms, budget_ms=budget_ms)
            table = StageTable(replace(problem, terms=terms))
            return any(best_placement(table, c).placement for c in combinations)

        if math.isinf(least):
            assert not feasible(1e6)
        else:
            assert feasible(least * 1.001)
            assert not feasible(least * 0.999)
            reached += 1
    assert reached >= 3


def test_stage_layers_are_contiguous_from_zero() -> None:
    problem, _, placement = some_pipeline(Phase.PREFILL)
    covered = [range(s.first_layer, s.first_layer + s.layers) for s in placement.stages]
    assert [layer for part in covered for layer in part] == list(range(problem.terms.layers))
    assert all(isinstance(stage, Stage) for stage in placement.stages)

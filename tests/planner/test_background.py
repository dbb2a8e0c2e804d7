"""A solve beside others: what it finds, what it is given, and that it stops."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from scipy import sparse

from planner.allocation.model import AllocationModel
from planner.allocation.solve import plan_allocation
from planner.background import BackgroundSolve
from planner.errors import SolverStoppedError
from planner.programs import Program, solve_program
from tests.builders import EXACT
from tests.planner.test_columns import random_input


def knapsack(items: int, seed: int) -> Program:
    """Many near-equal items that must add up to almost half: hard to prove."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(10_000, 20_000, items).astype(float)
    cost = -(weights + rng.uniform(0.0, 100.0, items))
    rows = sparse.csc_array(rng.integers(1, 1000, (12, items)).astype(float))
    return Program(
        rows, cost, np.zeros(items), np.ones(items), np.full(12, -np.inf),
        rows.sum(axis=1) * 0.5, np.ones(items, dtype=bool),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_it_proves_what_a_plain_solve_proves(seed: int) -> None:
    model = AllocationModel(random_input(seed))
    program = replace(model.program, cost=model.program.cost + 50.0 * model.shortfall)
    plain = solve_program(program)
    with BackgroundSolve(program, 1e-6, 20.0, model.nothing()) as background:
        background.wait(20.0)
        assert not background.running
    found = background.take()
    assert found is not None
    assert program.cost @ found == pytest.approx(plain.objective, rel=1e-5)
    assert background.bound == pytest.approx(plain.objective, rel=1e-5)
    assert background.take() is None


def test_it_stops_when_its_block_is_left_and_its_bound_holds() -> None:
    program = knapsack(120, 0)
    started = time.perf_counter()
    with BackgroundSolve(program, 1e-9, 60.0, None) as background:
        background.wait(1.0)
    assert time.perf_counter() - started < 30.0
    found = background.take()
    assert found is not None
    assert background.bound <= program.cost @ found + 1e-6
    assert np.isfinite(background.bound)


def test_a_solution_from_elsewhere_is_taken() -> None:
    program = knapsack(120, 1)
    better = solve_program(program, time_limit_s=1.5).values
    assert better is not None
    given = float(program.cost @ better)
    with BackgroundSolve(program, 1e-9, 3.0, np.zeros(program.columns)) as background:
        background.give(np.rint(better))
        background.wait(3.0)
    found = background.take()
    assert found is not None
    assert program.cost @ found <= given + 1e-6


def test_a_failure_is_noted_and_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SolverStoppedError("the solver failed")

    monkeypatch.setattr("planner.background.run_solver", fail)
    with BackgroundSolve(knapsack(5, 0), 1e-9, 1.0, None) as background:
        background.wait(1.0)
    assert str(background.failure) == "the solver failed"
    assert background.take() is None
    data = replace(random_input(0), settings=replace(EXACT, deadline_s=2.0))
    monkeypatch.setattr("planner.allocation.search.TINY", 0)
    assert plan_allocation(data).bound_usd > 0.0

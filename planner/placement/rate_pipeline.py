"""The pipeline of highest throughput on given machines, over a throughput table.

Bisection on the throughput v over small integer programs that ask for a pipeline of at least v.
Source: docs/formulation.md, section 9.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from planner.errors import SolverStoppedError
from planner.perf.grids import Floats
from planner.placement.rates import RatePipeline, RateStage, RateTable
from planner.programs import Program, solve_program
from planner.types import Combination, combination_of

TOLERANCE = 1e-6  # of a throughput: how near the proven bound is to it
NEAR = 1e-3  # a bracket so narrow is most likely closed at its lower end
ILP_TIME_LIMIT_S = 120.0

Counts = NDArray[np.int64]  # machines by class of a combination


def best_pipeline(table: RateTable, combination: Combination) -> RatePipeline:
    """The pipeline of highest throughput on some or all of the machines of a combination.

    The bound is within `TOLERANCE` of what it serves, unless a program ran out of time.
    Raises MissingProfileError: no table of a machine. NoTemplateError: the machines cannot hold
    the model.
    """
    table.require_room(combination)
    served, most, best = 0.0, table.work_bound(combination), None
    target = most / 2.0
    while most > served * (1.0 + TOLERANCE):
        found, settled = pipeline_at(table, combination, target)
        if not settled:
            break
        if found is not None:
            served, best = found.tokens_per_s, found
        else:
            most = target
        target = next_target(served, most, failed=found is None)
    if best is None:  # the machines hold the model, so some throughput is reached
        raise SolverStoppedError(f"{table.model}: the solver found no pipeline in time")
    return RatePipeline(best.stages, max(most, served))


def next_target(served: float, most: float, *, failed: bool) -> float:
    """Halves the bracket; tries to close a narrow one at its lower end after a target failed."""
    middle, lowest = (served + most) / 2.0, served * (1.0 + TOLERANCE)
    return lowest if failed and middle <= lowest * (1.0 + NEAR) else middle


def pipeline_at(
    table: RateTable, combination: Combination, least: float
) -> tuple[RatePipeline | None, bool]:
    """The pipeline of fewest machines that serves `least` tokens/s, None if there is none.

    And whether that is settled: the program may run out of time.

    Variables  stage[k], integer >= 0: how often column k = (machines, layers) is used
    Minimise   sum machines[k] stage[k]
    Such that  sum layers[k] stage[k] = L                                         (P1)
               sum count[k, c] stage[k] <= machines of class c                    (P2)
               columns are the smallest sets of machines that reach `least` with their layers,
               which each of them may hold                                        (P3, P4)
    Source     docs/formulation.md, section 9
    """
    rates = table.rates_of(combination)
    counts = np.array([count for _, count in combination], dtype=np.int64)
    columns = [
        (layers, part)
        for layers in range(1, rates.shape[1])
        for part in smallest_sets(rates[:, layers], counts, least)
    ]
    if not columns:
        return None, True
    held = np.array([layers for layers, _ in columns], dtype=np.int64)
    parts = np.array([part for _, part in columns], dtype=np.int64)
    answer = solve_program(
        _program(held, parts, counts, table.layers), time_limit_s=ILP_TIME_LIMIT_S
    )
    if answer.values is None:
        return None, answer.bound == np.inf  # infeasible
    chosen = np.rint(answer.values).astype(np.int64)
    stages = [
        RateStage(
            combination_of({n: int(c) for (n, _), c in zip(combination, parts[k], strict=True)}),
            int(held[k]),
            float(parts[k] @ rates[:, held[k]]),
        )
        for k in np.flatnonzero(chosen)
        for _ in range(chosen[k])
    ]
    return _checked(RatePipeline(tuple(stages), np.inf), combination, table.layers), True


def _program(held: Counts, parts: Counts, counts: Counts, layers: int) -> Program:
    rows = np.vstack([held, parts.T]).astype(float)
    return Program(
        matrix=sparse.csc_array(rows),
        cost=parts.sum(axis=1).astype(float),
        lower=np.zeros(held.size),
        upper=np.full(held.size, np.inf),
        row_lower=np.array([layers, *[-np.inf] * counts.size], dtype=float),
        row_upper=np.array([layers, *counts], dtype=float),
        integer=np.ones(held.size, dtype=bool),
    )


def smallest_sets(rates: Floats, counts: Counts, least: float) -> Iterator[Counts]:
    """Every set of machines whose rates reach `least` and of which none can be spared."""
    order = [i for i in np.argsort(-rates, kind="stable") if rates[i] > 0]
    left = np.cumsum([0.0, *(rates[i] * counts[i] for i in reversed(order))])[::-1]
    chosen = np.zeros_like(counts)

    def extend(position: int, total: float) -> Iterator[Counts]:
        if position == len(order) or total + left[position] < least:
            return
        index = order[position]
        for count in range(counts[index] + 1):
            chosen[index] = count
            reached = total + count * rates[index]
            if reached >= least:  # the last one added is the slowest, so none can be spared
                yield chosen.copy()
                break
            yield from extend(position + 1, reached)
        chosen[index] = 0

    yield from extend(0, 0.0)


def _checked(pipeline: RatePipeline, combination: Combination, layers: int) -> RatePipeline:
    """Recheck P1 and P2 on the integers."""
    used: Counter[str] = Counter()
    for stage in pipeline.stages:
        used.update(dict(stage.machines))
    total = sum(stage.layers for stage in pipeline.stages)
    if total != layers or any(used[name] > count for name, count in combination):
        raise SolverStoppedError("the solver's pipeline does not keep to its layers or machines")
    return pipeline

"""The least latency that any placement reaches: what to say when an SLO is impossible."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from planner.placement.ilp import min_sum_pipeline, pipeline_columns
from planner.placement.profile import PhaseProblem
from planner.placement.search import ILP_TIME_LIMIT_S
from planner.placement.stages import Role, StageTable, hop_ms
from planner.types import Combination, Phase, combination_size


def least_latency_ms(problem: PhaseProblem, combinations: Iterable[Combination]) -> float:
    """Least latency of P5 over all combinations, at one request, without any budget.

    Infinite when no combination holds the model with one request of p95 length.
    """
    free = replace(problem, terms=replace(problem.terms, budget_ms=np.inf, handover_ms=np.inf))
    table = StageTable(free)
    best = np.inf
    for combination in combinations:
        nodes = combination_size(combination)
        micro_batches = 1 if problem.phase is Phase.DECODE else nodes  # as the search has it
        for group in table.groups(combination):
            times = table.stage(group, Role.ONLY, micro_batches)
            best = min(best, float(times.latency_ms[free.terms.layers, 1]))
        if nodes > 1:
            best = min(best, _pipeline_latency_ms(table, combination, micro_batches, best))
    return best


def _pipeline_latency_ms(
    table: StageTable, combination: Combination, micro_batches: int, limit_ms: float
) -> float:
    hop = hop_ms(table.problem, combination, 1)
    columns = pipeline_columns(table, combination, micro_batches, 1, hop, limit_ms)
    found = min_sum_pipeline(
        columns, combination, table.problem.terms.layers, np.inf, limit_ms, ILP_TIME_LIMIT_S
    )
    if found is None:
        return float("inf")
    return hop * (len(found.stages) - 1) + sum(
        float(table.stage(s.group, s.role, micro_batches).latency_ms[s.layers, 1])
        for s in found.stages
    )

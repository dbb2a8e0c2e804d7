"""The least latency that any placement reaches: what to say when an SLO is impossible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.errors import ImpossibleSloError, InputError, NoTemplateError
from planner.placement.ilp import min_sum_pipeline, pipeline_columns
from planner.placement.profile import PhaseProblem
from planner.placement.search import ILP_TIME_LIMIT_S
from planner.placement.settings import PlacementSettings
from planner.placement.stages import Role, StageTable, hop_ms
from planner.types import Combination, Phase, Workload, combination_size

LONGEST_TTFT_MS = 1e6  # where the search for a possible TTFT gives up
TTFT_TOLERANCE = 0.005


def least_latency_ms(
    problem: PhaseProblem, combinations: Sequence[Combination], good_enough_ms: float = 0.0
) -> float:
    """Least latency of P5 over all combinations, at the smallest batch, whatever the budget.

    Stops at the first combination that reaches `good_enough_ms`. Infinite when no combination
    holds the model, one request of p95 length and the KV hand-over.
    """
    table = StageTable(replace(problem, terms=replace(problem.terms, budget_ms=np.inf)))
    batch = min(problem.batch_sizes)
    best = np.inf
    for combination in combinations:
        nodes = combination_size(combination)
        micro_batches = 1 if problem.phase.in_cycles else nodes  # as the search has it
        for group in table.groups(combination):
            times = table.stage(group, Role.ONLY, micro_batches)
            best = min(best, float(times.latency_ms[problem.terms.layers, batch]))
        if nodes > 1 and best > good_enough_ms:
            best = min(best, _pipeline_latency_ms(table, combination, micro_batches, best))
        if best <= good_enough_ms:
            break
    return best


def explain_no_template(
    workload: Workload,
    problem: PhaseProblem,
    combinations: Sequence[Combination],
    settings: PlacementSettings,
) -> InputError:
    """Why a phase has no template at all, with the objective that would be possible."""
    name, slo = workload.name, workload.slo
    remedy = "add node classes, or raise placement.max_nodes"
    unhindered = replace(problem, terms=replace(problem.terms, handover_ms=np.inf))
    if np.isinf(least_latency_ms(unhindered, combinations, good_enough_ms=np.inf)):
        return NoTemplateError(
            f"workload {name!r}: no combination of its node classes holds {workload.model.name} "
            f"({workload.model.total_bytes / 2**30:.0f} GiB of weights); {remedy}"
        )
    if problem.phase is Phase.PREFILL:
        possible = _least_ttft_ms(workload, problem, combinations, settings)
        if np.isinf(possible):
            return ImpossibleSloError(
                f"workload {name!r}: no TTFT at all is possible; {remedy}, or lower "
                "placement.ttft_queue_share and placement.kv_handover_share"
            )
        return ImpossibleSloError(
            f"workload {name!r}: no template meets its TTFT of {slo.ttft_ms:g} ms; with "
            f"{settings.ttft_queue_share:.0%} of it kept for queueing and "
            f"{settings.kv_handover_share:.0%} for the KV hand-over, the best achievable is a "
            f"TTFT of {np.ceil(possible):.0f} ms; raise slo.ttft_ms or add faster node classes"
        )
    least = least_latency_ms(problem, combinations)
    if np.isinf(least):
        return ImpossibleSloError(
            f"workload {name!r}: no nodes receive the KV of a p95 prompt within "
            f"{problem.terms.handover_ms:.0f} ms, {settings.kv_handover_share:.0%} of its TTFT; "
            f"raise slo.ttft_ms or placement.kv_handover_share, or {remedy}"
        )
    return ImpossibleSloError(
        f"workload {name!r}: no template meets its TPOT of {slo.tpot_ms:g} ms; the best "
        f"achievable is {np.ceil(10.0 * least) / 10.0:.1f} ms; raise slo.tpot_ms or add faster "
        "node classes"
    )


def _least_ttft_ms(
    workload: Workload,
    problem: PhaseProblem,
    combinations: Sequence[Combination],
    settings: PlacementSettings,
) -> float:
    """Least TTFT objective with a template: budget and hand-over both grow with it."""

    def possible(ttft_ms: float) -> bool:
        slo = replace(workload.slo, ttft_ms=ttft_ms)
        budget = settings.latency_budget_ms(Phase.PREFILL, slo)
        terms = replace(problem.terms, handover_ms=settings.kv_handover_ms(slo))
        trial = replace(problem, terms=terms)
        return budget > 0 and least_latency_ms(trial, combinations, budget) <= budget

    low, high = workload.slo.ttft_ms, 2.0 * workload.slo.ttft_ms
    while not possible(high):
        low, high = high, 2.0 * high
        if high > LONGEST_TTFT_MS:
            return np.inf
    while high - low > TTFT_TOLERANCE * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if possible(middle) else (middle, high)
    return high


def _pipeline_latency_ms(
    table: StageTable, combination: Combination, micro_batches: int, limit_ms: float
) -> float:
    batch = min(table.problem.batch_sizes)
    hop = hop_ms(table.problem, combination, batch)
    columns = pipeline_columns(table, combination, micro_batches, batch, hop, limit_ms)
    found = min_sum_pipeline(
        columns, combination, table.problem.terms.layers, np.inf, limit_ms, ILP_TIME_LIMIT_S
    )
    if found is None:
        return float("inf")
    return hop * (len(found.stages) - 1) + sum(
        float(table.stage(s.group, s.role, micro_batches).latency_ms[s.layers, batch])
        for s in found.stages
    )

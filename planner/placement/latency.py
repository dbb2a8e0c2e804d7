"""The least latency that any placement reaches: what to say when an SLO is impossible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from planner.errors import ImpossibleSloError, InputError, NoTemplateError
from planner.placement.combinations import CombinationSet
from planner.placement.exact import ExactSolver
from planner.placement.profile import PhaseProblem
from planner.placement.settings import RELATIVE_TOLERANCE, PlacementSettings
from planner.types import Phase, Workload

LONGEST_MS = 1e6  # where the search for a possible latency gives up
TOLERANCE = 5e-4
SLICE = 256  # combinations solved before looking at what was found


def least_latency_ms(problem: PhaseProblem, combinations: CombinationSet) -> float:
    """Least latency of P5 over all combinations, whatever the budget.

    Infinite when no combination holds the model, one request of p95 length and the KV hand-over.
    """
    terms = replace(problem.terms, budget_ms=LONGEST_MS, chunks_budget_ms=np.inf)
    unlimited = replace(problem, terms=terms, least_gain=RELATIVE_TOLERANCE)
    if problem.phase is not Phase.AGGREGATED:  # there a node's groups need a request each
        unlimited = replace(unlimited, batch_sizes=(min(problem.batch_sizes),))
    if not _possible(unlimited, combinations):
        return np.inf
    if problem.phase is Phase.DECODE:  # one micro-batch alone: most throughput is least cycle
        return _least_cycle_ms(unlimited, combinations)

    def possible(budget_ms: float) -> bool:
        trial = replace(unlimited, terms=replace(terms, budget_ms=budget_ms))
        return _possible(trial, combinations)

    return _least(possible, 1.0)


def _possible(problem: PhaseProblem, combinations: CombinationSet) -> bool:
    """Whether any combination has a placement."""
    solver = ExactSolver(problem, len(combinations.by_size))
    for level in combinations.by_size:
        for start in range(0, len(level), SLICE):
            some = level[start : start + SLICE]
            if solver.solve(some, np.zeros(len(some))).placements:
                return True
    return False


def _least_cycle_ms(problem: PhaseProblem, combinations: CombinationSet) -> float:
    best_ms = problem.terms.budget_ms
    for level in combinations.by_size:
        # What was found is the next budget: bounds are tight only near it.
        terms = replace(problem.terms, budget_ms=best_ms)
        solver = ExactSolver(
            replace(problem, terms=terms), len(combinations.by_size), most_micro_batches=1
        )
        for start in range(0, len(level), SLICE):
            some = level[start : start + SLICE]
            rps = min(problem.batch_sizes) * 1e3 / (terms.tokens_per_cycle * best_ms)
            found = solver.solve(some, np.full(len(some), rps))
            cycles = [placement.cycle_ms for placement in found.placements.values()]
            best_ms = min([best_ms, *cycles])
    return best_ms


def _least(possible: Callable[[float], bool], start: float) -> float:
    """Smallest value for which a rising condition holds; infinite beyond LONGEST_MS."""
    low, high = 0.0, start
    while not possible(high):
        low, high = high, 2.0 * high
        if high > LONGEST_MS:
            return np.inf
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if possible(middle) else (middle, high)
    return high


def explain_no_template(
    workload: Workload,
    problem: PhaseProblem,
    combinations: CombinationSet,
    settings: PlacementSettings,
) -> InputError:
    """Why a phase has no template at all, with the objective that would be possible."""
    name, slo = workload.name, workload.slo
    remedy = "add node classes, or raise placement.max_nodes"
    unhindered = replace(problem, terms=replace(problem.terms, handover_ms=np.inf))
    if np.isinf(least_latency_ms(unhindered, combinations)):
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
    combinations: CombinationSet,
    settings: PlacementSettings,
) -> float:
    """Least TTFT objective with a template: budget and hand-over both grow with it."""

    def possible(ttft_ms: float) -> bool:
        slo = replace(workload.slo, ttft_ms=ttft_ms)
        budget = settings.latency_budget_ms(Phase.PREFILL, slo)
        handover = settings.kv_handover_ms(slo)
        terms = replace(problem.terms, budget_ms=budget, handover_ms=handover)
        return budget > 0 and _possible(replace(problem, terms=terms), combinations)

    return _least(possible, 2.0 * workload.slo.ttft_ms)

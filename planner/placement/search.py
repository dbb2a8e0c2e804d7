"""The reference solver: the best placement of one combination by search over M, b and the ILP.

For a fixed (M, b), and for aggregated serving a least share of every group, let S(v) be the
least summed latency of a pipeline whose every stage takes at most v (the ILP). S never rises with
v, so the cycle `max(S(v), M v)` is least where they cross: a bisection over the distinct stage
times finds it. Pairs (M, b) are tried best bound first, and a pair whose bound cannot beat the
best placement so far is never solved. Production uses `exact.py`, which returns the same optimum.
Source: docs/formulation.md, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.errors import SolverStoppedError
from planner.perf.grids import Floats
from planner.placement.combinations import CombinationSet, Members
from planner.placement.ilp import (
    Columns,
    StageChoice,
    min_sum_pipeline,
    pipeline_columns,
)
from planner.placement.profile import PhaseProblem, prefill_micro_batches
from planner.placement.settings import RELATIVE_TOLERANCE, SHARE_WIDTHS
from planner.placement.solution import Outcome, Solved
from planner.placement.stages import Role, StageTable, Units, hop_ms, split_pipeline, units_of
from planner.types import Combination, Phase, Placement, combination_size

ILP_TIME_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Solution:
    """The best placement found, or None when nothing beats the floor."""

    placement: Placement | None
    proven: bool  # no ILP stopped at its time limit
    searches: int  # ILPs


@dataclass(frozen=True, slots=True)
class _Pair:
    """Micro-batches in flight and their size, with the shortest cycle that they could have."""

    micro_batches: int
    batch: int
    least_share: int  # aggregated: requests of a micro-batch that every group at work has
    cap_bound_ms: float  # no pipeline has a shorter slowest step
    cycle_bound_ms: float  # nor a shorter cycle
    rps_bound: float


@dataclass(frozen=True, slots=True)
class _Candidate:
    pair: _Pair
    stages: tuple[StageChoice, ...]
    cap_ms: float
    cycle_ms: float
    latency_ms: float
    raw_rps: float


@dataclass(frozen=True)
class IlpSolver:
    """Solves combinations one by one with the reference; small libraries only."""

    problem: PhaseProblem

    @cached_property
    def _table(self) -> StageTable:
        return StageTable(self.problem)

    def solve(self, members: Members, floors: Floats) -> Solved:
        """Best placements of combinations of one size that beat their floors."""
        solved = Solved.empty(len(members))
        rows = CombinationSet(self.problem.names, (members,))
        gain = (1.0 + self.problem.least_gain) / (1.0 + RELATIVE_TOLERANCE)
        for row, (combination, floor) in enumerate(zip(rows, floors.tolist(), strict=True)):
            found = best_placement(self._table, combination, floor * gain)
            outcome = Outcome.KEPT if found.placement else Outcome.NO_GAIN
            if found.placement is None and floor <= 0.0:
                outcome = Outcome.INFEASIBLE
            solved.set(
                row, outcome, floor, found.placement, searches=found.searches, proven=found.proven
            )
        return solved


def best_placement(table: StageTable, combination: Combination, floor_rps: float = 0.0) -> Solution:
    """The placement of highest throughput, if it is above `floor_rps` (before utilisation).

    Returns a Solution without placement when no placement inside the SLO beats the floor.
    """
    search = _Search(table, combination, floor_rps)
    pairs = sorted(
        search.pairs(),
        key=lambda p: (-p.rps_bound, p.micro_batches, p.batch, -p.least_share),
    )
    for pair in pairs:  # single stages first: closed form, and good floors for the ILPs
        search.try_stages(pair, (StageChoice(Role.ONLY, combination, table.problem.terms.layers),))
    if combination_size(combination) > 1:
        for pair in pairs:
            search.try_pipelines(pair)
    best = search.best
    placement = None if best is None else _read_back(table.problem, best)
    return Solution(placement, search.proven, search.ilps)


class _Search:
    """State of one combination's search."""

    def __init__(self, table: StageTable, combination: Combination, floor_rps: float) -> None:
        self.table, self.combination = table, combination
        self.problem: PhaseProblem = table.problem
        self.terms = table.problem.terms
        self.in_cycles = table.problem.phase.in_cycles
        self.floor_rps = floor_rps
        self.best: _Candidate | None = None
        self.proven = True
        self.ilps = 0

    def rps(self, pair: _Pair, cycle_ms: float) -> float:
        """Requests/s: M b / (o C) in cycles, b / slowest step for prefill."""
        in_cycle = pair.micro_batches * pair.batch if self.in_cycles else pair.batch
        return in_cycle * 1e3 / (self.terms.tokens_per_cycle * cycle_ms)

    def longest_cycle_ms(self, pair: _Pair) -> float:
        """The longest cycle that still beats the best so far (and, in cycles, meets P5)."""
        target = max(self.floor_rps, self.best.raw_rps if self.best else 0.0)
        limit = self.terms.longest_cycle_ms(pair.least_share) if self.in_cycles else np.inf
        if target > 0:
            limit = min(limit, self.rps(pair, 1.0) / (target * (1.0 + RELATIVE_TOLERANCE)))
        return float(limit)

    def pairs(self) -> list[_Pair]:
        nodes = combination_size(self.combination)
        counts = range(1, nodes + 1) if self.in_cycles else [prefill_micro_batches(nodes)]
        return [
            pair
            for micro_batches in counts
            for batch in self.problem.batch_sizes
            for share in self._least_shares(batch)
            if np.isfinite((pair := self._bounded(micro_batches, batch, share)).cycle_bound_ms)
        ]

    def _least_shares(self, batch: int) -> list[int]:
        """Aggregated: fewer data-parallel groups, each with more of a step for one prompt."""
        if self.problem.phase is not Phase.AGGREGATED:
            return [0]
        return sorted({-(-batch // width) for width in SHARE_WIDTHS})

    def try_stages(self, pair: _Pair, stages: tuple[StageChoice, ...]) -> None:
        """Placements whose stages are given."""
        if pair.cycle_bound_ms > self.longest_cycle_ms(pair):
            return
        hop = hop_ms(self.problem, self.combination, pair.batch)
        nodes = tuple(units_of(stage.part) for stage in stages)
        if self.in_cycles:
            slowest, latency = self._measure(stages, nodes, pair, hop, np.inf)
            cycle = max(latency, pair.micro_batches * slowest)
            if cycle <= self.longest_cycle_ms(pair):
                self._keep(pair, stages, cycle, cycle, cycle)
            return
        steps = [
            self.table.steps_ms(self.combination, s.role, pair.batch, s.layers) for s in stages
        ]
        caps = np.unique(np.concatenate(steps))
        caps = caps[caps <= self.longest_cycle_ms(pair)]
        low, high, found = 0, len(caps) - 1, None
        while low <= high:
            middle = (low + high) // 2
            _, latency = self._measure(stages, nodes, pair, hop, float(caps[middle]))
            if latency <= self.terms.budget_ms:
                found, high = (float(caps[middle]), latency), middle - 1
            else:
                low = middle + 1
        if found is not None:
            self._keep(pair, stages, found[0], found[0], found[1])

    def try_pipelines(self, pair: _Pair) -> None:
        limit = self.longest_cycle_ms(pair)
        if pair.cycle_bound_ms > limit:
            return
        hop = hop_ms(self.problem, self.combination, pair.batch)
        stretch = pair.micro_batches if self.in_cycles else 1
        columns = self._columns(pair, hop, np.inf) if self.in_cycles else None
        caps = self._caps(pair, columns)
        low = int(np.searchsorted(caps, pair.cap_bound_ms * (1 - 1e-9)))
        high = int(np.searchsorted(caps, limit / stretch, side="right")) - 1
        middle = high  # the loosest cap first: without a pipeline under it there is none at all
        while low <= high:
            cap = float(caps[middle])
            found = self._solve(columns or self._columns(pair, hop, cap), pair, cap)
            if found is None:
                low = middle + 1
            else:
                nodes = tuple(units_of(stage.part) for stage in found)
                slowest, latency = self._measure(found, nodes, pair, hop, cap)
                cycle = max(latency, stretch * slowest) if self.in_cycles else slowest
                self._keep(pair, found, cap, cycle, cycle if self.in_cycles else latency)
                if self.in_cycles and latency >= stretch * slowest:
                    low = middle + 1  # a lower cap only lengthens the sum
                else:
                    high = int(np.searchsorted(caps, slowest)) - 1
                limit = self.longest_cycle_ms(pair)
                high = min(high, int(np.searchsorted(caps, limit / stretch, side="right")) - 1)
            middle = (low + high) // 2

    def _columns(self, pair: _Pair, hop: float, cap_ms: float) -> Columns:
        longest = self.longest_cycle_ms(pair) if self.in_cycles else self.terms.budget_ms
        return pipeline_columns(
            self.table,
            self.combination,
            pair.micro_batches,
            pair.batch,
            hop,
            longest,
            pair.least_share,
            cap_ms,
        )

    def _caps(self, pair: _Pair, columns: Columns | None) -> Floats:
        """Distinct times that the slowest step of a pipeline can have."""
        if columns is not None:
            return np.unique(columns.latency_ms)
        roles = (Role.FIRST, Role.MIDDLE, Role.LAST)
        steps = [self.table.steps_ms(self.combination, role, pair.batch) for role in roles]
        return np.unique(np.concatenate(steps))

    def _solve(self, columns: Columns, pair: _Pair, cap: float) -> tuple[StageChoice, ...] | None:
        if not self._enough_work(pair, cap):
            return None
        budget = self.longest_cycle_ms(pair) if self.in_cycles else self.terms.budget_ms
        self.ilps += 1
        try:
            found = min_sum_pipeline(
                columns,
                self.combination,
                self.terms.layers,
                cap if self.in_cycles else np.inf,  # prefill: its columns are made for the cap
                budget,
                ILP_TIME_LIMIT_S,
            )
        except SolverStoppedError:  # one slow program must not end an hour's build
            self.proven, found = False, None
        if found is None:
            return None
        self.proven &= found.proven
        return found.stages

    def _measure(
        self,
        stages: tuple[StageChoice, ...],
        nodes: tuple[Units, ...],
        pair: _Pair,
        hop: float,
        cap_ms: float,
    ) -> tuple[float, float]:
        """Slowest step (prefill: the cap) and summed latency of a pipeline, hops included."""
        latencies = [
            float(
                self.table.latency_ms(
                    units, stage.role, pair.micro_batches, pair.batch, pair.least_share, cap_ms
                )[stage.layers]
            )
            for stage, units in zip(stages, nodes, strict=True)
        ]
        slowest = max(latencies) if self.in_cycles else cap_ms
        return slowest, sum(latencies) + hop * (len(stages) - 1)

    def _keep(
        self,
        pair: _Pair,
        stages: tuple[StageChoice, ...],
        cap_ms: float,
        cycle_ms: float,
        latency_ms: float,
    ) -> None:
        raw_rps = self.rps(pair, cycle_ms)
        if raw_rps > max(self.floor_rps, self.best.raw_rps if self.best else 0.0):
            self.best = _Candidate(pair, stages, cap_ms, cycle_ms, latency_ms, raw_rps)

    def _enough_work(self, pair: _Pair, cap_ms: float) -> bool:
        """Necessary: the nodes' most request-layers within one cap reach b x L."""
        return self._work(pair.micro_batches, pair.batch, cap_ms) >= (
            pair.batch * self.terms.layers
        )

    def _work(self, micro_batches: int, batch: int, cap_ms: float) -> float:
        return sum(
            count * self.table.work(name, micro_batches, batch, cap_ms)
            for name, count in self.combination
        )

    def _bounded(self, micro_batches: int, batch: int, share: int) -> _Pair:
        """A pair with a lower bound of its cycle: work (bisected) and, in cycles, the sum."""
        unbounded = _Pair(micro_batches, batch, share, np.inf, np.inf, 0.0)
        target = batch * self.terms.layers
        stretch = micro_batches if self.in_cycles else 1
        ceiling = self.longest_cycle_ms(unbounded) / stretch
        if not np.isfinite(ceiling):
            ceiling = 1e7
        if self._work(micro_batches, batch, ceiling) < target:
            return unbounded
        low, high = 0.0, ceiling
        while high - low > 1e-3 * high:
            middle = (low + high) / 2.0
            if self._work(micro_batches, batch, middle) < target:
                low = middle
            else:
                high = middle
        cycle = stretch * low
        shortest = self._sum_bound(micro_batches, batch)
        if shortest > self.terms.budget_ms:
            return unbounded
        if self.in_cycles:
            cycle = max(cycle, shortest)
        rps = self.rps(unbounded, cycle) if cycle > 0 else np.inf
        return _Pair(micro_batches, batch, share, low, cycle, rps)

    def _sum_bound(self, micro_batches: int, batch: int) -> float:
        """Every layer takes at least its share of the fastest stage: of all nodes together."""
        layers = np.arange(1, self.terms.layers + 1)
        units = units_of(self.combination)
        times = self.table.latency_ms(units, Role.NOWHERE, micro_batches, batch)
        return self.terms.layers * float((times[1:] / layers).min())


def _read_back(problem: PhaseProblem, best: _Candidate) -> Placement:
    pair = best.pair
    parts = [(choice.part, choice.layers) for choice in best.stages]
    stages = split_pipeline(
        problem, parts, pair.micro_batches, pair.batch, pair.least_share, best.cap_ms
    )
    return Placement(
        stages=stages,
        micro_batches=pair.micro_batches,
        micro_batch_size=pair.batch,
        cycle_ms=best.cycle_ms,
        latency_ms=best.latency_ms,
        raw_rps=best.raw_rps,
    )

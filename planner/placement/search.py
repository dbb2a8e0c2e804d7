"""The best placement of one combination: search over M and b around the ILP.

For a fixed (M, b), and for aggregated serving a least share of every group, let S(v) be the
least summed latency of a pipeline whose every stage takes at
most v (the ILP). S never rises with v, so the cycle `max(S(v), M v)` is least where they cross:
a bisection over the distinct stage times finds it. Pairs (M, b) are tried best bound first, and
a pair whose bound cannot beat the best placement so far is never solved.
Source: docs/formulation.md, section 3.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from planner.errors import SolverStoppedError
from planner.placement.combinations import sub_multisets
from planner.placement.ilp import (
    Columns,
    StageChoice,
    min_sum_pipeline,
    pipeline_columns,
)
from planner.placement.profile import PhaseProblem
from planner.placement.stages import Group, Role, StageTable, hop_ms
from planner.types import Combination, Phase, Placement, Stage, combination_size

RELATIVE_TOLERANCE = 1e-4  # of a cycle: where a bisection stops
ILP_TIME_LIMIT_S = 20.0
SHARE_WIDTHS = (1, 2, 4, 8)  # aggregated: data-parallel groups that a pair (M, b) allows for


@dataclass(frozen=True, slots=True)
class Solution:
    """The best placement found, or None when nothing beats the floor."""

    placement: Placement | None
    proven: bool  # no ILP stopped at its time limit
    ilps: int


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
    cycle_ms: float
    latency_ms: float
    raw_rps: float


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
        search.try_single_stage(pair)
    if combination_size(combination) > 1:
        for pair in pairs:
            search.try_pipelines(pair)
    best = search.best
    placement = None if best is None else _read_back(table, best)
    return Solution(placement, search.proven, search.ilps)


def throughput_of(table: StageTable, combination: Combination, placement: Placement) -> float:
    """What a given placement serves of the table's workload, before utilisation; 0 if nothing.

    Stages, layers and options stay; micro-batches and their size are chosen anew. This is
    T[t, w] of a workload that shares another's replicas.
    """
    search = _Search(table, combination, 0.0)
    stages = tuple(
        StageChoice(Role.at(index, len(placement.stages)), _group(table, stage), stage.layers)
        for index, stage in enumerate(placement.stages)
    )
    for pair in sorted(search.pairs(), key=lambda p: -p.rps_bound):
        search.try_stages(pair, stages)
    return search.best.raw_rps if search.best else 0.0


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
        # Prefill keeps at most one micro-batch per stage, and stages are at most the nodes.
        counts = range(1, nodes + 1) if self.in_cycles else [nodes]
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

    def try_single_stage(self, pair: _Pair) -> None:
        if pair.cycle_bound_ms > self.longest_cycle_ms(pair):
            return
        for group in self.table.groups(self.combination):
            steps, latencies = self.table.column(
                group, Role.ONLY, pair.micro_batches, pair.batch, pair.least_share
            )
            step = float(steps[self.terms.layers])
            latency = float(latencies[self.terms.layers])
            cycle = pair.micro_batches * step if self.in_cycles else step
            if latency <= self.terms.budget_ms and cycle <= self.longest_cycle_ms(pair):
                choice = StageChoice(Role.ONLY, group, self.terms.layers)
                self._keep(pair, (choice,), cycle, cycle if self.in_cycles else latency)

    def try_stages(self, pair: _Pair, stages: tuple[StageChoice, ...]) -> None:
        """A placement whose stages are given."""
        hop = hop_ms(self.problem, self.combination, pair.batch)
        slowest, latency = self._measure(stages, pair, hop)
        stretch = pair.micro_batches if self.in_cycles else 1
        cycle = max(latency, stretch * slowest) if self.in_cycles else slowest
        if latency <= self.terms.budget_ms and cycle <= self.longest_cycle_ms(pair):
            self._keep(pair, stages, cycle, cycle if self.in_cycles else latency)

    def try_pipelines(self, pair: _Pair) -> None:
        limit = self.longest_cycle_ms(pair)
        if pair.cycle_bound_ms > limit:
            return
        hop = hop_ms(self.problem, self.combination, pair.batch)
        longest = limit if self.in_cycles else self.terms.budget_ms
        columns = pipeline_columns(
            self.table,
            self.combination,
            pair.micro_batches,
            pair.batch,
            hop,
            longest,
            pair.least_share,
        )
        stretch = pair.micro_batches if self.in_cycles else 1
        caps = np.unique(columns.step_ms)
        low = int(np.searchsorted(caps, pair.cap_bound_ms * (1 - 1e-9)))
        high = int(np.searchsorted(caps, limit / stretch, side="right")) - 1
        middle = high  # the loosest cap first: without a pipeline under it there is none at all
        while low <= high:
            found = self._solve(columns, pair, float(caps[middle]))
            if found is None:
                low = middle + 1
            else:
                slowest, latency = self._measure(found, pair, hop)
                cycle = max(latency, stretch * slowest) if self.in_cycles else slowest
                self._keep(pair, found, cycle, cycle if self.in_cycles else latency)
                if self.in_cycles and latency >= stretch * slowest:
                    low = middle + 1  # a lower cap only lengthens the sum
                else:
                    high = int(np.searchsorted(caps, slowest)) - 1
                limit = self.longest_cycle_ms(pair)
                high = min(high, int(np.searchsorted(caps, limit / stretch, side="right")) - 1)
            middle = (low + high) // 2

    def _solve(self, columns: Columns, pair: _Pair, cap: float) -> tuple[StageChoice, ...] | None:
        if not self._enough_work(pair, cap):
            return None
        budget = self.longest_cycle_ms(pair) if self.in_cycles else self.terms.budget_ms
        self.ilps += 1
        try:
            found = min_sum_pipeline(
                columns, self.combination, self.terms.layers, cap, budget, ILP_TIME_LIMIT_S
            )
        except SolverStoppedError:  # one slow program must not end an hour's build
            self.proven, found = False, None
        if found is None:
            return None
        self.proven &= found.proven
        return found.stages

    def _measure(
        self, stages: tuple[StageChoice, ...], pair: _Pair, hop: float
    ) -> tuple[float, float]:
        """Slowest step and summed latency of a pipeline, hops included."""
        slowest, latency = 0.0, hop * (len(stages) - 1)
        for stage in stages:
            step, summed = self.table.column(
                stage.group, stage.role, pair.micro_batches, pair.batch, pair.least_share
            )
            slowest = max(slowest, float(step[stage.layers]))
            latency += float(summed[stage.layers])
        return slowest, latency

    def _keep(
        self, pair: _Pair, stages: tuple[StageChoice, ...], cycle_ms: float, latency_ms: float
    ) -> None:
        raw_rps = self.rps(pair, cycle_ms)
        if raw_rps > max(self.floor_rps, self.best.raw_rps if self.best else 0.0):
            self.best = _Candidate(pair, stages, cycle_ms, latency_ms, raw_rps)

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
        """Every layer takes at least its share of the fastest stage that the nodes can form."""
        layers = np.arange(1, self.terms.layers + 1)
        # In cycles more nodes never slow a stage down: all of them together are the fastest.
        whole = [self.combination] if self.in_cycles else sub_multisets(self.combination)
        return self.terms.layers * min(
            float((times.latency_ms[1:, batch] / layers).min())
            for part in whole
            for group in self.table.variants(part)
            for times in [self.table.stage(group, Role.NOWHERE, micro_batches)]
        )


def _group(table: StageTable, stage: Stage) -> Group:
    units = []
    for node in stage.nodes:
        options = table.problem.nodes[node.node_class].options
        shapes = [(option.tp, option.dp) for option in options]
        which = shapes.index((node.tensor_parallel_size, node.data_parallel_size))
        units.append((node.node_class, which))
    return tuple(sorted(Counter(units).items()))


def _read_back(table: StageTable, best: _Candidate) -> Placement:
    stages, first = [], 0
    for choice in best.stages:
        nodes = table.shares(
            choice.group, choice.role, best.pair.micro_batches, choice.layers, best.pair.batch
        )
        stages.append(Stage(first, choice.layers, nodes))
        first += choice.layers
    return Placement(
        stages=tuple(stages),
        micro_batches=best.pair.micro_batches,
        micro_batch_size=best.pair.batch,
        cycle_ms=best.cycle_ms,
        latency_ms=best.latency_ms,
        raw_rps=best.raw_rps,
    )

"""Minimise one objective over an allocation model: bounds from blocks, plans from neighbourhoods.

Column generation solves the linear relaxation; the blocks of `decomposition.py` raise its bound
and propose plans; integer programs over the columns that these plans use, and over neighbourhoods
of the best plan, improve it. Stops at the gap asked for, or at the deadline.
Source: docs/formulation.md, section 5.2.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from planner.allocation.assemble import shortfall_tolerance
from planner.allocation.decomposition import REST, Decomposition
from planner.allocation.model import AllocationModel
from planner.perf.grids import Floats
from planner.programs import Flags, LinearProgram, Program, Rows, solve_program

COLUMNS_PER_ROUND = 40  # of one domain, workload and phase that column generation adds
TINY = 100  # replica columns of a model that is solved as a whole at once
SMALL = 1500  # and of one that is later
NEIGHBOURHOOD_COLUMNS = 1200
NEIGHBOURHOOD_S = 2.0
LEAST_FREE = 2  # domains or workloads in a neighbourhood, of more
FIRST_SHARE = 0.4  # of all domains or workloads in a neighbourhood
STALLED = 5e-4  # of the bound: blocks that raise it less rest for a while
MOST_BLOCKS_S = 3.0  # of all blocks together, once
BLOCKS_SHARE = 0.06  # the same, of the time there is
NEGLIGIBLE = 1e-7
LEAST_GAP = 1e-6  # below it is the solver's own tolerance


@dataclass
class Effort:
    """What searches looked at, where their time went, and every better plan.

    `history` has seconds since the start, weighted shortfall and A0 of each.
    """

    columns_seen: int = 0
    columns_kept: int = 0  # in integer programs
    seconds: dict[str, float] = field(default_factory=dict)
    history: list[tuple[float, float, float]] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent


@dataclass(frozen=True)
class Relaxation:
    """Optimum of the linear relaxation."""

    objective: float
    duals: Floats  # of rows
    waste: Floats  # reduced cost of a replica over the worth of its nodes
    values: Floats  # of all columns
    pool: Rows  # all replica columns that were tried


def relax(
    model: AllocationModel, program: Program, effort: Effort, pool: Rows | None = None
) -> Relaxation:
    """Column generation from the replica columns of `pool` on, by negative reduced cost.

    Every round prices all columns at once. A replica that serves several workloads is priced with
    the loads that would come with it. The program must be feasible with the pool's columns.
    """
    parts = model.parts
    matrix = program.matrix.T.tocsr()
    inside = np.zeros(program.columns, dtype=bool)

    def with_loads(replicas: Rows) -> Rows:
        loads = model.loads_of
        return np.concatenate([replicas, *(loads[x] for x in replicas.tolist() if x in loads)])

    others = np.setdiff1d(np.arange(program.columns), np.concatenate([parts.replicas, parts.load]))
    first = others
    if pool is not None and pool.size:
        inside[pool] = True
        first = np.concatenate([others, with_loads(pool)])
    order = [first]
    lp = LinearProgram(program.of_columns(first))
    group = (
        (model.domain[parts.replicas] * (len(model.data.workloads) + 1)
         + model.workload[parts.replicas] + 1) * 3
        + model.phases[model.template[parts.replicas]]
    )  # fmt: skip
    while True:
        answer = lp.solve()
        reduced = program.cost - matrix @ answer.duals
        priced = reduced[parts.replicas] + best_loads(model, program, reduced)
        candidates = np.flatnonzero((priced < -NEGLIGIBLE) & ~inside[parts.replicas])
        if not candidates.size:
            break
        chosen = parts.replicas[_most_negative(candidates, priced, group, COLUMNS_PER_ROUND)]
        inside[chosen] = True
        new = with_loads(chosen)
        lp.add_columns(program.of_columns(new))
        order.append(new)
    columns = np.concatenate(order)
    effort.columns_seen = max(effort.columns_seen, parts.replicas.size)
    values = np.zeros(program.columns)
    if answer.values is not None:
        values[columns] = answer.values
    nodes = np.zeros(program.row_lower.size)
    nodes[model.node_rows] = np.maximum(-answer.duals[model.node_rows], 0.0)
    worth = (matrix @ nodes)[parts.replicas]
    waste = priced / np.maximum(worth, 1e-9 * max(1.0, float(worth.max(initial=0.0))))
    tried = parts.replicas[inside[parts.replicas]]
    return Relaxation(answer.objective, answer.duals, waste, values, tried)


def best_loads(model: AllocationModel, program: Program, reduced: Floats) -> Floats:
    """What the best load of each replica is worth, at most 0; rows of A4 are not there yet."""
    best = np.zeros(model.parts.replicas.size)
    if model.parts.load.size:
        t = model.template[model.parts.load]
        rate = model.rates[t, model.workload[model.parts.load]]
        np.minimum.at(best, model.replica_of_load, rate * reduced[model.parts.load])
    return best


def _most_negative(candidates: Rows, priced: Floats, group: Rows, most: int) -> Rows:
    """Of each group the candidates of least reduced cost."""
    order = candidates[np.lexsort((priced[candidates], group[candidates]))]
    sorted_groups = group[order]
    first = np.searchsorted(sorted_groups, sorted_groups, side="left")
    return order[np.arange(order.size) - first < most]


class Search:
    """One objective's search; `values` is the best plan so far, over all columns."""

    def __init__(
        self,
        model: AllocationModel,
        program: Program,
        gap: float,
        scale: float,
        effort: Effort,
        pool: Rows | None = None,
    ) -> None:
        self.model, self.program, self.effort = model, program, effort
        self.gap_asked, self.scale = gap, scale
        self.values: Floats | None = None
        self.objective = np.inf
        self.serving_all: Floats | None = None  # the cheapest plan without shortfall
        with effort.timed("relaxation"):
            self.relaxation = relax(model, program, effort, pool)
        self.bound = self.relaxation.objective
        self.share = FIRST_SHARE
        self._blocks: list[Decomposition] | None = None
        self.random = np.random.default_rng(0)
        self.kept = model.is_replica & (self.relaxation.values > NEGLIGIBLE)

    def follow(self, other: Search) -> None:
        """Go on from a search whose objective is nowhere larger: its plan, columns and bound."""
        self.offer(other.values)
        self.offer(other.serving_all)
        self.kept |= other.kept
        self.share = other.share
        self.raise_bound(other.bound)
        if self.model.parts.replicas.size > SMALL:
            self._blocks = []  # the time goes into plans

    @property
    def gap(self) -> float:
        """Relative to the objective, or to `scale` where that is more."""
        if not np.isfinite(self.objective):
            return np.inf
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), self.scale)

    @property
    def done(self) -> bool:
        return self.gap <= max(self.gap_asked, LEAST_GAP)

    def offer(self, values: Floats | None) -> bool:
        """Take a plan if it is the best so far."""
        if values is None:
            return False
        values = np.where(self.program.integer, np.rint(values), values)
        objective = float(self.program.cost @ values)
        model = self.model
        self.kept |= model.is_replica & (values > 0.5)
        cost, short = float(model.program.cost @ values), float(model.shortfall @ values)
        known = self.serving_all
        if short <= shortfall_tolerance(model.data) and (
            known is None or cost < model.program.cost @ known
        ):
            self.serving_all = values
        if objective >= self.objective - 1e-9 * max(1.0, abs(self.objective)):
            return False
        self.values, self.objective = values, objective
        now = time.perf_counter() - self.effort.started
        self.effort.history.append((now, short, cost))
        return True

    def raise_bound(self, bound: float) -> None:
        if bound > self.bound:
            self.bound = min(bound, self.objective)

    def run(self, deadline: float) -> None:
        """Until the gap is closed or perf_counter() passes `deadline`."""

        def left() -> float:
            return deadline - time.perf_counter()

        blocks_s = min(MOST_BLOCKS_S, BLOCKS_SHARE * left())
        if self._blocks is None:
            if self.model.parts.replicas.size <= TINY:
                self._whole(0.3 * left())
            self._round(0.05 * left() + 0.2)
            self._neighbourhoods(0.25 * left())
            if self.model.parts.replicas.size <= SMALL:
                self._whole(0.4 * left())
            self._blocks = self._decompositions()
            for each in self._blocks:
                if not self.done and left() > 0.05:
                    self._step(each, min(left(), blocks_s))
        decompositions = self._blocks
        turn, resting = 0, 0
        while not self.done and left() > 0.05:
            if decompositions and resting == 0:
                before, plan = self.bound, self.objective
                self._step(max(decompositions, key=lambda d: d.bound), min(left(), blocks_s))
                little = STALLED * max(abs(self.bound), self.scale)
                if self.bound - before < little and self.objective == plan:
                    resting = 3
            resting = max(0, resting - 1)
            if turn % 3 == 0:
                self._pool(min(left(), 2.0 + turn))
            self._neighbourhoods(min(left(), 6.0))
            turn += 1

    def _decompositions(self) -> list[Decomposition]:
        found = []
        for labels in (self.model.domain, self.model.family):
            if np.unique(labels[labels != REST]).size > 1:
                found.append(Decomposition(self.program, labels, self.relaxation.duals))
        return found

    def _step(self, blocks: Decomposition, seconds: float) -> None:
        with self.effort.timed("blocks"):
            blocks.evaluate(blocks.next_prices(), seconds)
        self.raise_bound(blocks.bound)
        for block in blocks.blocks:
            for plan in block.plans[-1:]:
                used = block.columns[plan.values > 0.5]
                self.kept[used[self.model.is_replica[used]]] = True
        with self.effort.timed("recombination"):
            found = blocks.recombine(min(seconds, 1.0), self.gap_asked / 2, self.objective)
            if found is not None and self.offer(found):
                blocks.add(found)

    def _whole(self, seconds: float) -> None:
        """All columns at once."""
        if self.done or seconds <= 0.05:
            return
        self.effort.columns_kept = self.program.columns
        with self.effort.timed("whole"):
            found = solve_program(
                self.program, time_limit_s=seconds, relative_gap=self.gap_asked, start=self.values
            )
        self.offer(found.values)
        if np.isfinite(found.bound):
            self.raise_bound(found.bound)

    def _round(self, seconds: float) -> None:
        """Whole replicas of the relaxation stay; what they leave is solved over good columns."""
        if self.done or seconds <= 0.05:
            return
        replicas = self.model.parts.replicas
        base = np.zeros(self.program.columns)
        base[replicas] = np.floor(self.relaxation.values[replicas] + NEGLIGIBLE)
        with self.effort.timed("rounding"):
            free = self._free(self._thrifty(self.model.is_replica) | self.kept)
            self._solve_free(free, seconds, base)

    def _pool(self, seconds: float) -> None:
        """Columns that some plan or the relaxation uses."""
        if self.done or seconds <= 0.05:
            return
        with self.effort.timed("pool"):
            self._solve_free(self._free(self.kept), seconds)

    def _neighbourhoods(self, seconds: float) -> None:
        """Domains or workloads of the best plan, solved again; more at once while that is easy."""
        if self.values is None:
            return
        ends = time.perf_counter() + seconds
        with self.effort.timed("neighbourhoods"):
            while not self.done and (room := ends - time.perf_counter()) > 0.05:
                labels = self.model.domain if self.random.random() < 0.5 else self.model.family
                names = np.unique(labels[labels != REST])
                free = self._neighbours(labels, names)
                before = self.objective
                proven = self._solve_free(free, min(room, NEIGHBOURHOOD_S))
                if not proven:
                    self.share = max(0.02, 0.8 * self.share)
                elif self.objective >= before:
                    self.share = min(1.0, 1.2 * self.share)

    def _neighbours(self, labels: Rows, names: Rows) -> Flags:
        least = min(LEAST_FREE, max(1, names.size - 1))
        wanted = int(self.share * names.size + self.random.random())
        count = min(names.size, max(least, wanted))
        chosen = np.isin(labels, self.random.choice(names, count, replace=False))
        replicas = chosen & self.model.is_replica
        return self._free(self._thrifty(replicas) | (self.kept & replicas))

    def _thrifty(self, replicas: Flags) -> Flags:
        """Of some replicas those of least waste, as many as a neighbourhood has."""
        waste = self.relaxation.waste[replicas[self.model.parts.replicas]]
        if waste.size <= NEIGHBOURHOOD_COLUMNS:
            return replicas
        best = np.argpartition(waste, NEIGHBOURHOOD_COLUMNS)[:NEIGHBOURHOOD_COLUMNS]
        thrifty = np.zeros_like(replicas)
        thrifty[np.flatnonzero(replicas)[best]] = True
        return thrifty

    def _free(self, replicas: Flags) -> Flags:
        """Some replicas with their loads, and all other columns, free to change."""
        parts = self.model.parts
        free = ~self.model.is_replica | replicas
        free[parts.load] = replicas[parts.replicas[self.model.replica_of_load]]
        return free

    def _solve_free(self, free: Flags, seconds: float, base: Floats | None = None) -> bool:
        """Improve the best plan over the free columns; whether that was done to the end.

        With `base` the free columns come on top of it.
        """
        columns = np.flatnonzero(free)
        start = None
        if base is None:
            base = np.zeros(self.program.columns)
            if self.values is not None:
                base, start = np.where(free, 0.0, self.values), self.values[columns]
        part = self.program.of_columns(columns).given(self.program.matrix @ base)
        self.effort.columns_kept = max(self.effort.columns_kept, int(columns.size))
        found = solve_program(
            part, time_limit_s=seconds, relative_gap=self.gap_asked / 4, start=start
        )
        if found.values is not None:
            values = base.copy()
            values[columns] += found.values
            self.offer(values)
        return found.proven

"""Minimise one objective over an allocation model: bounds from blocks, plans from neighbourhoods.

Column generation solves the linear relaxation; the blocks of `decomposition.py` raise its bound
and propose plans; integer programs over the columns that these plans use, and over neighbourhoods
of the best plan, improve it. Stops at the gap asked for, or at the deadline.
Source: docs/formulation.md, section 5.2.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from planner.allocation.assemble import shortfall_tolerance
from planner.allocation.decomposition import REST, Decomposition
from planner.allocation.dive import dive
from planner.allocation.model import AllocationModel
from planner.allocation.relaxation import NEGLIGIBLE, Relaxation, Relaxer, best_of_each
from planner.background import BackgroundSolve
from planner.perf.grids import Floats
from planner.programs import Answer, Flags, Program, Rows, solve_program

TINY = 100  # replica columns of a model that is solved as a whole at once
SMALL = 1500  # and of one that is solved as a whole beside the rest
MANY_REPLICAS = 500  # in the relaxation, where plans begin with a dive: rounding is a small matter
NEIGHBOURHOOD_COLUMNS = 1200
NEIGHBOURHOOD_S = 2.0  # at first
SMALL_NEIGHBOURHOOD_S = 0.6  # the same of a small model
MANY_IN_VAIN = 8  # neighbourhoods without a better plan, after which they get half as long again
SHORT_WEIGHT = 20.0  # of a workload that falls short among those of a neighbourhood
COMPLETE_S = 0.3  # for the nodes and loads of given replicas
LEAST_FREE = 2  # domains or workloads in a neighbourhood, of more
DIVE_SHARE = 0.7  # of the time, for a plan domain by domain
DIVE_REST = 0.5  # of that, for what the last domains leave
LEAST_DIVE_REST_S = 1.0
DIVE_COLUMNS = 2500
FIRST_SHARE = 0.4  # of all domains or workloads in a neighbourhood
FIRST_COLUMNS = 6000  # replica columns of the first neighbourhoods, where that is less
STALLED = 5e-4  # of the bound: blocks that raise it less
MANY_STALLED = 4  # times in a row rest for a while
BLOCKS_TURN_S = 2.5  # of blocks between neighbourhoods
MOST_BLOCKS_S = 3.0  # of all blocks together, once
BLOCKS_SHARE = 0.06  # the same, of the time there is
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


def is_small(model: AllocationModel) -> bool:
    """Whether one integer program over all columns may be solved to the end."""
    return bool(model.parts.replicas.size <= SMALL)


def is_large(model: AllocationModel, relaxation: Relaxation) -> bool:
    """Whether plans are so large that they are made domain by domain first."""
    replicas = model.parts.replicas
    return replicas.size > SMALL and float(relaxation.values[replicas].sum()) >= MANY_REPLICAS


class Search:
    """One objective's search; `values` is the best plan so far, over all columns."""

    def __init__(
        self,
        model: AllocationModel,
        program: Program,
        gap: float,
        scale: float,
        effort: Effort,
        relaxer: Relaxer | None = None,
    ) -> None:
        self.model, self.program, self.effort = model, program, effort
        self.relaxer = relaxer or Relaxer(model)
        self.gap_asked, self.scale = gap, scale
        self.values: Floats | None = None
        self.objective = np.inf
        self.serving_all: Floats | None = None  # the cheapest plan without shortfall
        with effort.timed("relaxation"):
            self.relaxation = self.relaxer.solve(program)
        effort.columns_seen = max(effort.columns_seen, model.parts.replicas.size)
        self.bound = self.relaxation.objective
        share = min(FIRST_SHARE, FIRST_COLUMNS / max(1, model.parts.replicas.size))
        self.shares = [share, share, share]  # of domains, workloads and cells in a neighbourhood
        self.patience_s = SMALL_NEIGHBOURHOOD_S if is_small(model) else NEIGHBOURHOOD_S
        self._in_vain = 0
        self._blocks: list[Decomposition] | None = None
        self._beside: BackgroundSolve | None = None
        cells = np.where(
            (model.domain == REST) | (model.family == REST),
            REST,
            model.domain * (1 + model.family.max(initial=0)) + model.family,
        )
        self._labels = (model.domain, model.family, cells)
        self.random = np.random.default_rng(0)
        self._lock = threading.RLock()  # neighbourhoods are solved side by side
        self._gives_up_after_s, self._better_at = np.inf, time.perf_counter()
        self.kept = model.is_replica & (self.relaxation.values > NEGLIGIBLE)
        self.is_large = is_large(model, self.relaxation)

    def follow(self, other: Search) -> None:
        """Go on from a search whose objective is nowhere larger: its plan, columns and bound."""
        self.offer(other.values)
        self.offer(other.serving_all)
        self.kept |= other.kept
        self.shares = list(other.shares)
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
        with self._lock:
            return self._take(values)

    def _take(self, values: Floats) -> bool:
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
        self._better_at = time.perf_counter()
        self.effort.history.append((self._better_at - self.effort.started, short, cost))
        return True

    @property
    def _gives_up(self) -> bool:
        waited_s = time.perf_counter() - self._better_at
        return self.values is not None and waited_s > self._gives_up_after_s

    def raise_bound(self, bound: float) -> None:
        if bound > self.bound:
            self.bound = min(bound, self.objective)

    def run(self, deadline: float, patience_s: float = np.inf) -> None:
        """Until the gap is closed or perf_counter() passes `deadline`.

        Or until no better plan came for `patience_s`, once there is one.
        """
        self._gives_up_after_s, self._better_at = patience_s, time.perf_counter()
        if self.model.parts.replicas.size <= TINY:
            self._whole(0.3 * (deadline - time.perf_counter()))
        seconds = deadline - time.perf_counter()
        if self.done or seconds <= 0.05:
            return
        if not is_small(self.model):
            self._alternate(deadline)
            return
        self.effort.columns_kept = self.program.columns
        with (
            self.effort.timed("whole, beside the rest"),
            BackgroundSolve(self.program, self.gap_asked, seconds, self.values) as beside,
        ):
            self._beside = beside
            self._alternate(deadline)
        self._exchange()
        self._beside = None

    def _exchange(self) -> None:
        """Plans and bounds to and from the solve beside."""
        beside = self._beside
        if beside is None:
            return
        theirs, mine = beside.take(), self.objective
        self.offer(theirs)
        if self.values is not None and self.objective == mine:
            beside.give(self.values)
        self.raise_bound(beside.bound)

    def _alternate(self, deadline: float) -> None:
        """Plans from neighbourhoods and bounds from blocks in turns."""

        def left() -> float:
            return deadline - time.perf_counter()

        blocks_s = min(MOST_BLOCKS_S, BLOCKS_SHARE * left())
        if self._blocks is None:
            if self.is_large:
                self._blocks = []
                self._dive(DIVE_SHARE * left())
            else:
                self._round(0.05 * left() + 0.2)
                self._neighbourhoods(0.25 * left())
                self._blocks = self._decompositions()
            for each in self._blocks:
                if not self.done and left() > 0.05:
                    self._step(each, min(left(), blocks_s))
        turn, resting, stalled = 0, 0, 0
        while not self.done and left() > 0.05 and not self._gives_up:
            ends = time.perf_counter() + min(left(), BLOCKS_TURN_S)
            while self._blocks and resting == 0 and not self.done and time.perf_counter() < ends:
                before, plan = self.bound, self.objective
                self._step(max(self._blocks, key=lambda d: d.bound), min(left(), blocks_s))
                little = STALLED * max(abs(self.bound), self.scale)
                went_on = self.bound - before >= little or self.objective != plan
                stalled = 0 if went_on else stalled + 1
                if stalled >= MANY_STALLED:
                    resting, stalled = 4, 0
            resting = max(0, resting - 1)
            if turn % 3 == 0 and not self.is_large:
                self._pool(min(left(), 2.0 + turn))
            plan = self.objective
            self._neighbourhoods(min(left(), max(6.0, 3.0 * self.patience_s)))
            if self.objective == plan:
                resting = 0  # then rather bounds
            if self.values is None and self._beside is not None:
                self._beside.wait(min(left(), 0.1))
            self._exchange()
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
            if self.values is not None:
                blocks.add(self.values)
            found = blocks.recombine(min(seconds, 1.0), self.gap_asked / 2, self.objective)
            self.offer(found)

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

    def _dive(self, seconds: float) -> None:
        """Domain by domain in integers; what the last of them leave is solved together."""
        model, ends = self.model, time.perf_counter() + seconds
        with self.effort.timed("dive"):
            soon = ends - DIVE_REST * seconds
            found = dive(model, self.program, self.relaxer, self.relaxation, soon)
            fitting = self._fitting(found.base)
            free = self._thrifty(fitting, DIVE_COLUMNS, found.relaxation.waste)
            free |= model.is_replica & (found.relaxation.values > found.base + NEGLIGIBLE)
            left = max(LEAST_DIVE_REST_S, ends - time.perf_counter())
            self._solve_free(self._free(free), left, found.base)

    def _pool(self, seconds: float) -> None:
        """Columns that some plan or the relaxation uses."""
        if self.done or seconds <= 0.05:
            return
        with self.effort.timed("pool"):
            self._solve_free(self._free(self.kept), seconds)

    def _neighbourhoods(self, seconds: float) -> None:
        """Parts of the best plan, solved again on all cores; more at once while that is easy."""
        if self.values is None:
            return
        ends = time.perf_counter() + seconds
        cores = max(1, (os.cpu_count() or 1) - (self._beside is not None))
        with self.effort.timed("neighbourhoods"), ThreadPoolExecutor(cores) as threads:
            list(threads.map(self._improve_until, [ends] * cores))

    def _improve_until(self, ends: float) -> None:
        while not (self.done or self._gives_up) and (room := ends - time.perf_counter()) > 0.05:
            with self._lock:
                kind = int(self.random.integers(len(self._labels)))
                labels = self._labels[kind]
                names = np.unique(labels[labels != REST])
                free = self._neighbours(labels, names, self.shares[kind])
                base, before = self.values, self.objective
            found = self._solve_part(free, min(room, self.patience_s), base)
            if found.values is not None:
                self._offer_part(found.values, base)
            with self._lock:
                self._learn(kind, found.proven, self.objective < before)
                self._exchange()

    def _learn(self, kind: int, proven: bool, better: bool) -> None:
        """From one neighbourhood: how large the next of its kind are, and how long they take."""
        self._in_vain = 0 if better else self._in_vain + 1
        if not proven:
            self.shares[kind] = max(0.02, 0.8 * self.shares[kind])
        elif not better:
            self.shares[kind] = min(1.0, 1.2 * self.shares[kind])
        if self._in_vain >= MANY_IN_VAIN and not proven:
            self.patience_s, self._in_vain = 1.5 * self.patience_s, 0

    def _offer_part(self, values: Floats, base: Floats | None) -> None:
        """A plan made from `base`; where another one came in meanwhile, both changes together."""
        with self._lock:
            if self.offer(values) or base is None or self.values is None or self.values is base:
                return
            x = self.model.parts.replicas
            replicas = self.values[x] + np.rint(values[x]) - base[x]
            improved = float(self.program.cost @ (values - base)) < 0
        if improved and (replicas >= 0).all():
            self.offer(self._completed(replicas))

    def _completed(self, replicas: Floats) -> Floats | None:
        """All columns for some replicas, if a plan has them."""
        x, others = self.model.parts.replicas, np.flatnonzero(~self.model.is_replica)
        values = np.zeros(self.program.columns)
        values[x] = replicas
        part = self.program.of_columns(others).given(self.program.matrix @ values)
        found = solve_program(part, time_limit_s=COMPLETE_S)
        if found.values is None:
            return None
        values[others] = found.values
        return values

    def _neighbours(self, labels: Rows, names: Rows, share: float) -> Flags:
        least = min(LEAST_FREE, max(1, names.size - 1))
        wanted = int(share * names.size + self.random.random())
        count = min(names.size, max(least, wanted))
        weights = np.ones(names.size)
        if labels is self.model.family and self.values is not None:  # those that fall short first
            missing = self.values[self.model.parts.short] > NEGLIGIBLE
            short = labels[self.model.parts.short[missing]]
            weights[np.isin(names, short)] = SHORT_WEIGHT
        drawn = self.random.choice(names, count, replace=False, p=weights / weights.sum())
        chosen = np.isin(labels, drawn)
        replicas = chosen & self.model.is_replica
        fitting = replicas
        if self.values is not None:
            fitting = replicas & self._fitting(np.where(replicas, 0.0, self.values))
        return self._free(self._thrifty(fitting) | (self.kept & fitting) | replicas & self._used)

    @property
    def _used(self) -> Flags:
        """Replicas of the best plan."""
        if self.values is None:
            return np.zeros_like(self.model.is_replica)
        return self.model.is_replica & (self.values > 0.5)

    def _fitting(self, values: Floats) -> Flags:
        """Replicas whose nodes are there beside those that some values use."""
        model, x = self.model, self.model.parts.replicas
        used = x[values[x] > 0.5]
        room = model.available.copy()
        counts = model.counts[model.template[used]] * values[used, None]
        np.subtract.at(room, model.domain[used], counts)
        fits = (model.counts[model.template[x]] <= room[model.domain[x]] + NEGLIGIBLE).all(axis=1)
        flags = np.zeros_like(model.is_replica)
        flags[x] = fits
        return flags

    def _thrifty(
        self, replicas: Flags, most: int = NEIGHBOURHOOD_COLUMNS, waste: Floats | None = None
    ) -> Flags:
        """Of some replicas those of least waste, of every workload and phase equally many."""
        x = self.model.parts.replicas
        costs = self.relaxation.waste if waste is None else waste
        thrifty = np.zeros_like(replicas)
        thrifty[x] = best_of_each(self.model, replicas[x], costs, most)
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
        found = self._solve_part(free, seconds, self.values, base)
        self.offer(found.values)
        return found.proven

    def _solve_part(
        self, free: Flags, seconds: float, plan: Floats | None, base: Floats | None = None
    ) -> Answer:
        """A plan's free columns solved again, or free columns on top of `base`; all columns."""
        columns = np.flatnonzero(free)
        start = None
        if base is None:
            base = np.zeros(self.program.columns)
            if plan is not None:
                base, start = np.where(free, 0.0, plan), plan[columns]
        part = self.program.of_columns(columns).given(self.program.matrix @ base)
        self.effort.columns_kept = max(self.effort.columns_kept, int(columns.size))
        found = solve_program(
            part, time_limit_s=seconds, relative_gap=self.gap_asked / 4, start=start
        )
        if found.values is None:
            return found
        values = base.copy()
        values[columns] += found.values
        return replace(found, values=values)

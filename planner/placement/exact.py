"""The exact placement solver of production: compiled dynamic programs behind relaxations.

Returns the optimum of the reference (`search.py`) within the same tolerance; `bench.placement`
compares the two. For every pair (M, b) relaxations of rising cost say whether anything can beat
the floor; what is left is searched by a dynamic program over subsets of nodes and layers under a
cap, and a search on the cap. Source: docs/formulation.md, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.errors import CoralError
from planner.perf.grids import Floats
from planner.placement import kernels
from planner.placement.arrays import PhaseArrays, Relaxations, shape_of
from planner.placement.combinations import Members, by_shape
from planner.placement.evaluate import evaluate
from planner.placement.profile import PhaseProblem
from planner.placement.solution import Outcome, Solved
from planner.placement.stages import KnownTimes, split_pipeline
from planner.types import Combination, Placement, combination_of, describe_combination

ROUNDING = 1e-9  # relative slack of a cap when a split is read back
MOST_KNOWN = 8192  # node times kept for reading back, of some kilobytes each


class SolverDefectError(CoralError):
    """The compiled solver claims a throughput that its placement does not reach."""


@dataclass(frozen=True)
class ExactSolver:
    """Solves combinations of up to `max_nodes` nodes of one phase problem."""

    problem: PhaseProblem
    max_nodes: int
    most_micro_batches: int | None = None  # fewer than nodes: for questions about latency
    _scratch: dict[int, kernels.Scratch] = field(default_factory=dict, repr=False)
    _known: KnownTimes = field(default_factory=dict, repr=False)

    @cached_property
    def _arrays(self) -> PhaseArrays:
        return PhaseArrays(self.problem)

    @cached_property
    def _relaxations(self) -> Relaxations:
        return Relaxations(self._arrays, self.max_nodes)

    @cached_property
    def _shared(self) -> Floats:
        """Stage times of one and two nodes, kept from one combination to the next."""
        classes = len(self._arrays.names)
        layers = self.problem.terms.layers + 1
        if not self.problem.phase.in_cycles:  # they depend on the cap
            return np.zeros((len(self._relaxations.pairs.batch), 1, 1, 1), dtype=np.float32)
        groups = classes * (classes + 3) // 2
        shape = (len(self._relaxations.pairs.batch), groups, 3, layers)
        return np.zeros(shape, dtype=np.float32)

    def solve(self, members: Members, floors: Floats) -> Solved:
        """Best placements of combinations of one size that beat their floors.

        `members`: class numbers, shape (n, nodes), rising; `floors`: requests/s before
        utilisation, shape (n,).
        """
        size = members.shape[1]
        if size > self.max_nodes:
            raise ValueError(f"combinations of {size} nodes, more than {self.max_nodes}")
        pairs, bounds, chosen = self._relaxations.of_size(size, self.most_micro_batches or size)
        solved = Solved.empty(len(members))
        for counts, rows, distinct in by_shape(members):
            shape = shape_of(counts)
            found = _results(len(rows))
            case = kernels.Case(
                self._arrays.nodes,
                self._arrays.terms,
                bounds,
                pairs,
                shape,
                self._space(len(shape.sizes)),
                self._shared[chosen],
            )
            kernels.solve(case, distinct, floors[rows], found)
            for index, row in enumerate(rows.tolist()):
                code = int(found.code[index])
                placement = None
                if code == kernels.GAINED:
                    placement = self._read_back(distinct[index], shape, found, index, pairs)
                solved.set(
                    row, Outcome.of(code, float(floors[row])), float(floors[row]), placement,
                    searches=int(found.searches[index]),
                )  # fmt: skip
        return solved

    def _read_back(
        self,
        classes: NDArray[np.uint8],
        shape: kernels.Shape,
        found: kernels.Results,
        index: int,
        pairs: kernels.Pairs,
    ) -> Placement:
        """Shares of every node, and the placement's own figures from them."""
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        names = [self._arrays.names[c] for c in classes]
        micro, batch, share = (
            int(column[found.pair[index]])
            for column in (pairs.micro_batches, pairs.batch, pairs.least_share)
        )
        cycle = float(found.cycle_ms[index])
        cap = np.inf if self.problem.phase.in_cycles else cycle * (1.0 + ROUNDING)
        parts = [
            (
                _named(names, shape.digits[found.subsets[index, i]]),
                int(found.stage_layers[index, i]),
            )
            for i in range(int(found.stages[index]))
        ]
        stages = split_pipeline(self.problem, parts, micro, batch, share, cap, self._known)
        draft = Placement(stages, micro, batch, cycle, cycle, float(found.rps[index]))
        whole = _named(names, shape.counts)
        real = evaluate(self.problem, whole, draft)
        if real.raw_rps < draft.raw_rps * (1.0 - 1e-6):
            raise SolverDefectError(
                f"{self.problem.workload} {self.problem.phase} on {describe_combination(whole)}: "
                f"the solver says {draft.raw_rps:.6g} requests/s, its placement has "
                f"{real.raw_rps:.6g}"
            )
        return Placement(stages, micro, batch, real.cycle_ms, real.latency_ms, real.raw_rps)

    def _space(self, subsets: int) -> kernels.Scratch:
        if subsets not in self._scratch:
            self._scratch[subsets] = _scratch(
                subsets,
                self.problem.terms.layers + 1,
                1 if self.problem.phase.in_cycles else self._arrays.most_batch + 1,
                len(self._relaxations.pairs.batch),
            )
        return self._scratch[subsets]


def _named(names: Sequence[str], counts: NDArray[np.int64]) -> Combination:
    return combination_of(dict(zip(names, counts.tolist(), strict=True)))


def _results(rows: int) -> kernels.Results:
    def whole(*shape: int) -> NDArray[np.int64]:
        return np.zeros((rows, *shape), dtype=np.int64)

    most = kernels.MOST_NODES
    return kernels.Results(
        code=whole(),
        rps=np.zeros(rows),
        pair=whole(),
        cycle_ms=np.zeros(rows),
        stages=whole(),
        subsets=whole(most),
        stage_layers=whole(most),
        searches=whole(),
    )


def _scratch(subsets: int, layers: int, prompts: int, pairs: int) -> kernels.Scratch:
    def whole(*shape: int) -> NDArray[np.int64]:
        return np.zeros(shape, dtype=np.int64)

    nodes, roles = kernels.MOST_NODES, 4
    split = kernels.Split(
        low=whole(nodes, nodes),
        middle=whole(nodes, nodes),
        high=whole(nodes, nodes),
        room=whole(nodes, nodes),
        space=whole(5, 2 * nodes),
    )
    return kernels.Scratch(
        reach=whole(nodes, roles, layers),
        slots=np.zeros((nodes, roles, layers, prompts)),
        most_layers=whole(roles, subsets),
        cost=np.zeros((roles, subsets, layers)),
        middle=whole(subsets),
        first=whole(subsets),
        rest=whole(subsets),
        best=np.zeros((subsets, layers)),
        from_subset=whole(subsets, layers),
        from_layers=whole(subsets, layers),
        relaxed=whole(subsets),
        slope=np.zeros(subsets),
        head=np.zeros(subsets),
        value=np.zeros(subsets),
        with_first=np.zeros(subsets),
        split=split,
        alive=whole(pairs),
        shortest=np.zeros(pairs),
        stages=whole(nodes),
        layers=whole(nodes),
    )

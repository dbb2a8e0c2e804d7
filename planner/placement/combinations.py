"""Which combinations of node classes are worth a placement (DESIGN: N_max and rho).

There can be hundreds of thousands, so they are rows of arrays: the numbers of their classes in the
order of the names, rising.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import comb

import numpy as np
from numpy.typing import NDArray

from planner.perf.grids import Floats
from planner.placement import kernels
from planner.placement.arrays import shape_of
from planner.placement.profile import GIB, PhaseProblem
from planner.types import Combination, combination_of

Members = NDArray[np.uint8]  # shape (combinations, nodes of each), rising along a row

TOO_SMALL = "memory below the model's weights"
TOO_LARGE = "memory above rho times the weights"


@dataclass(frozen=True)
class CombinationSet:
    """Combinations to solve, smallest first, and how many were left out for which reason."""

    names: tuple[str, ...]
    by_size: tuple[Members, ...]  # index 0: single nodes
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Combination]:
        return (self.combination(row) for level in self.by_size for row in level)

    def __len__(self) -> int:
        return sum(len(level) for level in self.by_size)

    def combination(self, row: NDArray[np.uint8] | Sequence[int]) -> Combination:
        """The combination of one row."""
        counts: dict[str, int] = {}
        for number in row:
            name = self.names[number]
            counts[name] = counts.get(name, 0) + 1
        return combination_of(counts)


def members_of(names: Sequence[str], combination: Combination) -> Members:
    """A combination as the one row of an array."""
    numbers = [names.index(name) for name, count in combination for _ in range(count)]
    return np.array([sorted(numbers)], dtype=np.uint8)


def count_multisets(classes: int, max_nodes: int) -> int:
    """Multisets of 1 to max_nodes node classes."""
    return comb(classes + max_nodes, max_nodes) - 1


def enumerate_combinations(
    problem: PhaseProblem, max_nodes: int, memory_ratio: float
) -> CombinationSet:
    """All multisets of at most `max_nodes` classes with memory between 1x and rho x the model.

    Single nodes are exempt from rho: one big node is a real choice even for a small model.
    """
    names = problem.names
    memory_gib = np.array([problem.nodes[name].memory_gib for name in names])
    model_gib = problem.terms.model_bytes / GIB
    left_out = {TOO_SMALL: 0, TOO_LARGE: 0}
    levels: list[Members] = []
    level: Members = np.empty((1, 0), dtype=np.uint8)
    for size in range(1, max_nodes + 1):
        level = _add_one(level, len(names))
        total = memory_gib[level].sum(axis=1)
        few = total <= memory_ratio * model_gib  # more of them only have more memory
        left_out[TOO_LARGE] += comb(len(names) + size - 1, size) - int(few.sum())
        enough = total >= model_gib
        left_out[TOO_SMALL] += int((few & ~enough).sum())
        if size == 1:
            levels.append(level[enough])
            left_out[TOO_LARGE] -= int((~few).sum())
        else:
            levels.append(level[few & enough])
        level = level[few]
    return CombinationSet(names, tuple(levels), left_out)


def by_shape(members: Members) -> Iterator[tuple[tuple[int, ...], NDArray[np.intp], Members]]:
    """Rows with equal multiplicities together: (counts, row numbers, their distinct classes)."""
    new = np.ones(members.shape, dtype=bool)
    new[:, 1:] = members[:, 1:] != members[:, :-1]
    codes = new @ (1 << np.arange(members.shape[1]))
    for code in np.unique(codes):
        rows = np.flatnonzero(codes == code)
        starts = np.flatnonzero(new[rows[0]])
        counts = np.diff([*starts, members.shape[1]])
        yield tuple(counts.tolist()), rows, np.ascontiguousarray(members[np.ix_(rows, starts)])


@dataclass(frozen=True)
class SplitFloors:
    """Best throughput of every combination or of its parts, filled size by size.

    The floor of a combination is the largest summed throughput of two that make it up: one that
    does not beat it is not worth a template, since the two parts cost the same, fit the same stock
    and serve as much (docs/formulation.md, section 4).
    """

    classes: int
    max_nodes: int

    @cached_property
    def _best(self) -> Floats:
        return np.zeros(count_multisets(self.classes, self.max_nodes) + 1)

    @cached_property
    def _binomial(self) -> NDArray[np.int64]:
        size = self.classes + self.max_nodes + 1
        table = [[comb(n, k) for k in range(self.max_nodes + 2)] for n in range(size)]
        return np.array(table, dtype=np.int64)

    @cached_property
    def _first(self) -> NDArray[np.int64]:
        sizes = [comb(self.classes + size - 1, size) for size in range(self.max_nodes + 1)]
        return np.cumsum([0, *sizes], dtype=np.int64)

    def floors(self, members: Members) -> Floats:
        """Largest sum over two parts, for combinations of one size."""
        floors = np.zeros(len(members))
        for counts, rows, distinct in by_shape(members):
            shape = shape_of(counts)
            found = np.zeros(len(rows))
            kernels.best_splits(
                distinct, shape, self._best, self._binomial, self._first, found,
                np.zeros(len(shape.sizes)), np.zeros(self.max_nodes + 1, dtype=np.int64),
            )  # fmt: skip
            floors[rows] = found
        return floors

    def record(self, members: Members, best_rps: Floats) -> None:
        """What combinations of one size serve, themselves or as parts."""
        numbers = np.full(len(members), self._first[members.shape[1]])
        for i in range(members.shape[1]):
            numbers += self._binomial[members[:, i].astype(np.int64) + i, i + 1]
        self._best[numbers] = best_rps


def sub_multisets(combination: Combination) -> Iterator[Combination]:
    """Every non-empty sub-multiset, the combination itself last."""
    names = [name for name, _ in combination]
    for counts in product(*(range(count + 1) for _, count in combination)):
        if any(counts):
            yield combination_of(dict(zip(names, counts, strict=True)))


def _add_one(level: Members, classes: int) -> Members:
    """Every row with one more class that is not below its last."""
    last = level[:, -1] if level.shape[1] else np.zeros(len(level), dtype=np.uint8)
    more = classes - last.astype(np.int64)
    rows = np.repeat(np.arange(len(level)), more)
    offset = np.arange(rows.size) - np.repeat(np.cumsum(more) - more, more)
    added = (last[rows] + offset).astype(np.uint8)
    return np.hstack([level[rows], added[:, None]])

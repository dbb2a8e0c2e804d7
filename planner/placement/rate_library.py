"""Highest throughput of a pipeline on every sub-multiset of machines, over a throughput table.

A dynamic program over machines and layers: small clusters and small templates, all at once, where
`rate_pipeline` answers for one large combination. Source: docs/formulation.md, section 9.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from planner.errors import InputError
from planner.perf.grids import Floats
from planner.placement.rates import RateTable
from planner.placement.settings import RELATIVE_TOLERANCE
from planner.types import Combination, combination_of

MOST_COMBINATIONS = 20_000  # the program takes time and memory in proportion to their square


@dataclass(frozen=True)
class RateLibrary:
    """Every combination of at most so many machines of a cluster, the empty one first."""

    names: tuple[str, ...]
    counts: NDArray[np.int64]  # machines by class, shape (combinations, classes)
    tokens_per_s: Floats  # T(K): of the best pipeline on K; 0 where K cannot hold the model
    floor_tokens_per_s: Floats  # F(K): most that two parts of K serve, in parts of their own

    def kept(self, least_gain: float = RELATIVE_TOLERANCE) -> Iterator[tuple[Combination, float]]:
        """Combinations that serve more than their parts, with their tokens/s."""
        better = self.tokens_per_s > self.floor_tokens_per_s * (1.0 + least_gain)
        for row in np.flatnonzero(better):
            counts = dict(zip(self.names, self.counts[row].tolist(), strict=True))
            yield combination_of(counts), float(self.tokens_per_s[row])


def rate_library(table: RateTable, cluster: Combination, max_machines: int) -> RateLibrary:
    """Solve every combination of at most `max_machines` machines of a cluster.

    A(K, n) is the highest least stage of stages on some machines of K with n layers in all. For any
    machine k of K, A(K, n) = max(A(K - k, n), max over parts T of K with k, l layers of
    min(A(K - T, n - l), S(T, l))), with S the sum over the machines of T; T(K) = A(K, L).
    Raises MissingProfileError: no table of a machine. NoTemplateError: the cluster cannot hold the
    model. InputError: more than `MOST_COMBINATIONS` combinations.
    """
    table.require_room(cluster)
    rates = table.rates_of(cluster)
    layers, most = table.layers, rates.shape[1] - 1
    counts = _sub_multisets([count for _, count in cluster], max_machines)
    radix = np.cumprod([1, *(count + 1 for _, count in cluster[:0:-1])])[::-1]
    number = np.full(int(radix[0]) * (cluster[0][1] + 1), -1)
    codes = counts @ radix
    number[codes] = np.arange(len(codes))
    stage = (counts @ rates)[:, 1:]
    padded = np.zeros((len(counts), most + layers + 1))  # A(K, n) in column most + n
    padded[0, most] = np.inf
    # before[K, n, l - 1] = A(K, n - l)
    before = sliding_window_view(padded[:, :-1], most, axis=1)[:, :, ::-1]
    floor = np.zeros(len(counts))
    for row in range(1, len(counts)):
        parts = np.flatnonzero((counts[: row + 1] <= counts[row]).all(axis=1))
        rest = number[codes[row] - codes[parts]]
        alone = padded[:, -1]
        floor[row] = (np.maximum(alone, floor)[parts] + np.maximum(alone, floor)[rest]).max()
        first = int(np.flatnonzero(counts[row])[0])
        holds = counts[parts, first] > 0
        joined = np.minimum(before[rest[holds]], stage[parts[holds], None, :]).max(axis=(0, 2))
        idle = padded[number[codes[row] - radix[first]], most:]
        padded[row, most:] = np.maximum(joined, idle)
    names = tuple(name for name, _ in cluster)
    return RateLibrary(names, counts, padded[:, -1].copy(), floor)


def _sub_multisets(counts: list[int], max_machines: int) -> NDArray[np.int64]:
    """Rows in rising order of their mixed radix number, so that parts come before the whole."""
    found: list[tuple[int, ...]] = []
    for row in product(*(range(min(count, max_machines) + 1) for count in counts)):
        if sum(row) <= max_machines:
            found.append(row)
            if len(found) > MOST_COMBINATIONS:
                raise InputError(
                    f"more than {MOST_COMBINATIONS} combinations of at most {max_machines} "
                    "machines; allow fewer machines per replica"
                )
    return np.array(found, dtype=np.int64)

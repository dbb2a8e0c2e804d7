"""A phase problem as arrays, and the tables of relaxations, for the compiled solver."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from planner.placement import kernels
from planner.placement.profile import NodeProfile, PhaseProblem, prefill_micro_batches
from planner.placement.settings import RELATIVE_TOLERANCE, SHARE_WIDTHS
from planner.placement.stages import Role, handover_ms, network_ms
from planner.types import Phase

ROLES = (Role.ONLY, Role.FIRST, Role.MIDDLE, Role.LAST, Role.NOWHERE)  # as kernels number them
KINDS = {
    Phase.DECODE: kernels.DECODE,
    Phase.PREFILL: kernels.PREFILL,
    Phase.AGGREGATED: kernels.AGGREGATED,
}
GRID_RATIO = 1.05  # of one time of the relaxations' grid to the next
LAYER_STEPS = 4096  # of the grid of single layers
GRID_SPAN = 2e3  # longest over shortest time of the grid; below it the relaxations are loose


@dataclass(frozen=True)
class PhaseArrays:
    """Numbers of all node classes of a phase problem, in the order of their names."""

    problem: PhaseProblem

    @property
    def names(self) -> tuple[str, ...]:
        return self.problem.names

    @cached_property
    def most_batch(self) -> int:
        return max(self.problem.batch_sizes)

    @property
    def _profiles(self) -> list[NodeProfile]:
        return [self.problem.nodes[name] for name in self.names]

    @cached_property
    def terms(self) -> kernels.Terms:
        terms = self.problem.terms
        hop = 8.0 * terms.hop_bytes_per_token
        return kernels.Terms(
            kind=KINDS[self.problem.phase],
            layers=terms.layers,
            budget_ms=terms.budget_ms,
            hop_latency_ms=terms.hop_latency_ms,
            hop_ms_per_bit=terms.hop_ms_per_byte / 8.0,
            hop_bits=hop * terms.hop_tokens,
            hop_bits_extra=hop * terms.hop_tokens_extra,
            tolerance=RELATIVE_TOLERANCE,
            least_gain=self.problem.least_gain,
        )

    @cached_property
    def nodes(self) -> kernels.Nodes:
        profiles, most, terms = self._profiles, self.most_batch, self.problem.terms
        shape = (len(profiles), max(len(profile.options) for profile in profiles))
        layers = np.arange(terms.layers + 1)
        nodes = kernels.Nodes(
            options=np.array([len(profile.options) for profile in profiles]),
            dp=np.ones(shape, dtype=np.int64),
            layer_ms=np.full((*shape, most + 1), np.inf),
            head_ms=np.full((*shape, most + 1), np.inf),
            latency_ms=np.full((*shape, most + 1), np.inf),
            overhead_ms=np.zeros(shape),
            room=np.zeros((*shape, len(ROLES), layers.size), dtype=np.int64),
            network_ms=np.array(
                [
                    [network_ms(self.problem, profile, role, layers, 1.0) for role in ROLES]
                    for profile in profiles
                ]
            ),
            most=np.stack([_most_requests(self.problem, profile, most) for profile in profiles]),
            peak_gbit_per_s=np.array([profile.network_peak_gbit_per_s for profile in profiles]),
        )
        for c, profile in enumerate(profiles):
            for o, option in enumerate(profile.options):
                nodes.dp[c, o] = option.dp
                nodes.overhead_ms[c, o] = option.overhead_ms
                for array, times in (
                    (nodes.layer_ms, option.layer_ms),
                    (nodes.head_ms, option.head_ms),
                    (nodes.latency_ms, option.latency_layer_ms),
                ):
                    array[c, o, 0], array[c, o, 1:] = 0.0, times[:most]
                for r, role in enumerate(ROLES):
                    nodes.room[c, o, r] = option.most_sequences(
                        layers, first=role.is_first, last=role.is_last, terms=terms
                    )
        return nodes

    def pairs(self, max_nodes: int) -> kernels.Pairs:
        """Every (M, b), and least share, of combinations of so many nodes, by rising M."""
        problem = self.problem
        mixed = problem.phase is Phase.AGGREGATED
        rows = []
        for nodes in range(1, max_nodes + 1):
            m = nodes if problem.phase.in_cycles else prefill_micro_batches(nodes)
            for b in problem.batch_sizes:
                # Of widths with the same least share only the widest counts.
                shares = {-(-b // width): width for width in SHARE_WIDTHS} if mixed else {0: 1}
                for share, width in shares.items():
                    table = (nodes - 1) * len(SHARE_WIDTHS) + SHARE_WIDTHS.index(width)
                    rows.append((m, b, share, table if mixed else nodes - 1))
        micro, batch, share, table = np.array(rows, dtype=np.int64).T.copy()
        if problem.phase.in_cycles:
            limits = [problem.terms.longest_cycle_ms(row[2]) for row in rows]
            in_cycle = micro * batch
        else:  # a step's compute is within the budget, its network finite
            longest = float(self.nodes.network_ms.max()) * self.most_batch
            limits = [max(problem.terms.budget_ms, longest)] * len(rows)
            in_cycle = batch
        return kernels.Pairs(
            micro_batches=micro,
            batch=batch,
            least_share=share,
            limit_ms=np.array(limits, dtype=float),
            rps_ms=in_cycle * 1e3 / problem.terms.tokens_per_cycle,
            table=table,
        )


def _most_requests(problem: PhaseProblem, node: NodeProfile, most: int) -> NDArray[np.int64]:
    """Requests of a micro-batch whose KV hand-over is quick enough, by layers."""
    layers = np.arange(problem.terms.layers + 1)[:, None]
    batches = np.arange(1, most + 1)[None, :]
    quick = handover_ms(problem, node, layers, batches) <= problem.terms.handover_ms
    every = np.broadcast_to(quick, (layers.size, most))
    counts: NDArray[np.int64] = np.cumprod(every, axis=1, dtype=np.int64).sum(axis=1)
    counts[0] = 0
    return counts


@dataclass(frozen=True)
class Relaxations:
    """Tables of `kernels.Bounds` for all pairs, filled for each M when first needed."""

    arrays: PhaseArrays
    max_nodes: int

    @cached_property
    def pairs(self) -> kernels.Pairs:
        return self.arrays.pairs(self.max_nodes)

    @cached_property
    def _tables(self) -> kernels.Bounds:
        pairs, arrays = self.pairs, self.arrays
        top = float(pairs.limit_ms.max()) * GRID_RATIO
        steps = int(np.ceil(np.log(GRID_SPAN) / np.log(GRID_RATIO)))
        grid = top * GRID_RATIO ** np.arange(-steps, 1.0)
        classes, layers = len(arrays.names), arrays.terms.layers
        times = arrays.nodes.latency_ms[:, :, 1:]
        times = times[np.isfinite(times)]
        layer_grid = np.ones(1)  # nothing is finite: no node does anything
        if times.size:
            layer_grid = np.geomspace(times.min(), times.max() * (1.0 + 1e-9), LAYER_STEPS)
        layer_requests = np.zeros((classes, layer_grid.size), dtype=np.int64)
        kernels.fill_layer_requests(arrays.nodes, layer_grid, arrays.most_batch, layer_requests)
        tables = int(pairs.table.max()) + 1
        return kernels.Bounds(
            grid=grid,
            requests=np.zeros((tables, classes, grid.size, layers + 1), dtype=np.int16),
            layer_grid=layer_grid,
            layer_requests=layer_requests,
            work=np.zeros((pairs.batch.size, classes, grid.size), dtype=np.float32),
        )

    @cached_property
    def _filled(self) -> set[int]:
        return set()

    def of_size(self, size: int, most: int) -> tuple[kernels.Pairs, kernels.Bounds, slice]:
        """Pairs of combinations of `size` nodes, their tables, and their positions.

        `most`: micro-batches in flight, in cycles.
        """
        micro = self.pairs.micro_batches
        first, last = 1, most
        if not self.arrays.problem.phase.in_cycles:
            first = last = prefill_micro_batches(size)
        chosen = slice(*np.searchsorted(micro, [first, last + 1]).tolist())
        for m in range(first, last + 1):
            if m not in self._filled:
                self._fill(m)
                self._filled.add(m)
        pairs = kernels.Pairs(*(column[chosen] for column in self.pairs))
        return pairs, self._tables._replace(work=self._tables.work[chosen]), chosen

    def _fill(self, micro_batches: int) -> None:
        pairs, tables, arrays = self.pairs, self._tables, self.arrays
        mine = np.flatnonzero(pairs.micro_batches == micro_batches)
        for table in np.unique(pairs.table[mine]).tolist():
            width = int(arrays.nodes.dp.max())  # any: groups may be idle
            if arrays.problem.phase is Phase.AGGREGATED:
                width = SHARE_WIDTHS[table % len(SHARE_WIDTHS)]
            kernels.fill_requests(
                arrays.nodes,
                tables.grid,
                micro_batches,
                width,
                arrays.most_batch,
                tables.requests[table],
            )
        for p in mine.tolist():
            kernels.fill_work(
                tables.requests[pairs.table[p]],
                int(pairs.batch[p]),
                int(pairs.least_share[p]),
                tables.work[p],
            )


@cache
def shape_of(counts: tuple[int, ...]) -> kernels.Shape:
    """Subsets of combinations whose distinct classes occur so often."""
    ranges = [range(count + 1) for count in reversed(counts)]
    digits = np.array([subset[::-1] for subset in product(*ranges)], dtype=np.int64)
    parts = [np.flatnonzero((digits <= subset).all(axis=1))[1:] for subset in digits]
    return kernels.Shape(
        counts=np.array(counts, dtype=np.int64),
        digits=digits,
        sizes=digits.sum(axis=1),
        starts=np.cumsum([0, *(part.size for part in parts)]),
        parts=np.concatenate(parts).astype(np.int64),
    )

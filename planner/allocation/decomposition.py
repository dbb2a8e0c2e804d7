"""Bounds and plans from blocks: the program without the rows that link its blocks.

With a price on every linking row the program falls into blocks, one per domain (demand links them)
or per workload (stock does). Each block is an integer program of its own, so the bound keeps what
the linear relaxation gives away; its solutions are plans of a block, and the best choice of one
plan per block is a plan of the whole. Source: docs/formulation.md, section 5.2 (Lagrangian
relaxation, Geoffrion 1974; stabilised by boxes, Marsten, Hogan and Blankenship 1975).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import sparse

from planner.perf.grids import Floats
from planner.programs import Program, Rows, solve_program

REST = -1  # label of columns outside all blocks
FIRST_WIDTH = 0.3  # of the box around the best prices, relative
LEAST_WIDTH = 5e-3
WIDER, NARROWER = 1.3, 0.6
BLOCK_GAP = 2e-3
MOST_PLANS = 60  # of one block; the oldest go


@dataclass
class Block:
    """Columns and rows that no linking row would join to others."""

    columns: Rows
    program: Program  # with its own rows
    links: sparse.csc_array  # its columns in the linking rows
    plans: list[BlockPlan] = field(default_factory=list)

    @property
    def may_be_empty(self) -> bool:
        """Whether doing nothing is a plan."""
        lower, upper = self.program.row_lower, self.program.row_upper
        return bool((lower <= 0.0).all() and (upper >= 0.0).all())


@dataclass(frozen=True)
class BlockPlan:
    """Values of a block's columns, and what they come to."""

    values: Floats
    cost: float
    use: Floats  # of the linking rows


class Decomposition:
    """A program by blocks; `labels` says which block each column belongs to, or REST.

    `duals` are the relaxation's, of all rows: the first prices.
    """

    def __init__(self, program: Program, labels: Rows, duals: Floats) -> None:
        self.program = program
        matrix = program.matrix.tocsr()
        of_row = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
        low = np.full(matrix.shape[0], labels.max() + 1)
        high = np.full(matrix.shape[0], REST - 1)
        np.minimum.at(low, of_row, labels[matrix.indices])
        np.maximum.at(high, of_row, labels[matrix.indices])
        self.linking = np.flatnonzero(low < high)
        own = low == high
        self.rest = self._block(np.flatnonzero(labels == REST), np.flatnonzero(own & (low == REST)))
        self.blocks = [
            self._block(np.flatnonzero(labels == label), np.flatnonzero(own & (low == label)))
            for label in np.unique(labels[labels != REST])
        ]
        self.lower = program.row_lower[self.linking]
        self.upper = program.row_upper[self.linking]
        self.bound = -np.inf
        self.prices = duals[self.linking]
        self.width = FIRST_WIDTH

    def _block(self, columns: Rows, rows: Rows) -> Block:
        chosen = self.program.of_columns(columns)
        return Block(columns, chosen.of_rows(rows), chosen.matrix.tocsr()[self.linking].tocsc())

    def evaluate(self, prices: Floats, seconds: float) -> float:
        """A lower bound from prices of the linking rows; the blocks' solutions become plans.

        `seconds` is for all blocks together, on all cores.
        """
        prices = np.where(np.isfinite(self.lower), prices, np.minimum(prices, 0.0))
        prices = np.where(np.isfinite(self.upper), prices, np.maximum(prices, 0.0))
        each = max(0.2, seconds * (os.cpu_count() or 1) / max(1, len(self.blocks)))
        finite = np.where(prices > 0, self.lower, self.upper)
        bound = float((prices * np.where(prices == 0, 0.0, finite)).sum())

        def solve(block: Block) -> float:
            cost = block.program.cost - block.links.T @ prices
            best = min(block.plans, key=lambda p: cost @ p.values, default=None)
            found = solve_program(
                replace(block.program, cost=cost), time_limit_s=each, relative_gap=BLOCK_GAP,
                start=best.values if best else None,
            )  # fmt: skip
            if found.values is not None:
                values = np.where(block.program.integer, np.rint(found.values), found.values)
                self._keep(block, values)
            if np.isfinite(found.bound):
                return found.bound
            return solve_program(replace(block.program, cost=cost), relax=True).objective

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            bound += sum(threads.map(solve, self.blocks))
        cost = self.rest.program.cost - self.rest.links.T @ prices
        bound += solve_program(replace(self.rest.program, cost=cost), relax=True).objective
        if bound > self.bound:
            self.bound, self.prices = bound, prices
            self.width *= WIDER
        else:
            self.width = max(LEAST_WIDTH, NARROWER * self.width)
        return bound

    def _keep(self, block: Block, values: Floats) -> None:
        if not any(np.array_equal(plan.values, values) for plan in block.plans):
            cost = float(block.program.cost @ values)
            block.plans.append(BlockPlan(values, cost, block.links @ values))
            del block.plans[:-MOST_PLANS]

    def add(self, values: Floats) -> None:
        """The blocks' parts of a solution as plans."""
        for block in self.blocks:
            self._keep(block, values[block.columns])

    def next_prices(self) -> Floats:
        """Prices at which the known plans together are worth most, near the best so far.

        The first prices while nothing was evaluated at them.
        """
        if not np.isfinite(self.bound):
            return self.prices
        links = self.linking.size
        mean = float(np.abs(self.prices).mean())
        scale = np.maximum(np.abs(self.prices), 0.02 * mean if mean > 0 else 1.0)
        high, low = self.prices + self.width * scale, self.prices - self.width * scale
        slack = sparse.eye_array(self._master_rows, links, format="csc")
        master = self._master()
        wide = Program(
            sparse.hstack([master.matrix, slack, -slack], format="csc"),
            np.concatenate([master.cost, high, -low]),
            np.zeros(master.columns + 2 * links),
            np.concatenate([master.upper, np.full(2 * links, np.inf)]),
            master.row_lower,
            master.row_upper,
            np.zeros(master.columns + 2 * links, dtype=bool),
        )
        return solve_program(wide, relax=True).duals[:links]

    def recombine(self, seconds: float, gap: float, limit: float) -> Floats | None:
        """The best choice of one plan per block, if it costs less than `limit`."""
        master = self._master()
        found = solve_program(master, time_limit_s=seconds, relative_gap=gap)
        if found.values is None or found.objective >= limit:
            return None
        values = np.zeros(self.program.columns)
        values[self.rest.columns] = found.values[: self.rest.columns.size]
        position = self.rest.columns.size
        for block in self.blocks:
            for plan in block.plans:
                if found.values[position] > 0.5:
                    values[block.columns] = plan.values
                position += 1
        return values

    @property
    def _master_rows(self) -> int:
        return self.linking.size + self.rest.program.row_lower.size + len(self.blocks)

    def _master(self) -> Program:
        """The rest's columns and one column per plan, under linking and the rest's rows."""
        plans = [(n, plan) for n, block in enumerate(self.blocks) for plan in block.plans]
        use = np.array([plan.use for _, plan in plans]).reshape(len(plans), self.linking.size).T
        choice = np.zeros((len(self.blocks), len(plans)))
        for column, (n, _) in enumerate(plans):
            choice[n, column] = 1.0
        rest, nothing = self.rest.program, len(self.blocks)
        matrix = sparse.block_array(
            [
                [self.rest.links, sparse.csc_array(use)],
                [rest.matrix, sparse.csc_array((rest.row_lower.size, len(plans)))],
                [sparse.csc_array((nothing, rest.columns)), sparse.csc_array(choice)],
            ],
            format="csc",
        )
        at_least = np.array([0.0 if block.may_be_empty else 1.0 for block in self.blocks])
        return Program(
            matrix,
            np.concatenate([rest.cost, [plan.cost for _, plan in plans]]),
            np.concatenate([rest.lower, np.zeros(len(plans))]),
            np.concatenate([rest.upper, np.ones(len(plans))]),
            np.concatenate([self.lower, rest.row_lower, at_least]),
            np.concatenate([self.upper, rest.row_upper, np.ones(nothing)]),
            np.concatenate([rest.integer, np.ones(len(plans), dtype=bool)]),
        )

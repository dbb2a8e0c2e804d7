"""The linear relaxation of an allocation model by column generation.

Source: docs/formulation.md, section 5.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.allocation.model import AllocationModel
from planner.allocation.numbers import PHASES
from planner.perf.grids import Floats
from planner.programs import Flags, LinearProgram, Program, Rows

COLUMNS_PER_ROUND = 40  # of one domain, workload and phase that come in at once
MOST_COLUMNS_PER_ROUND = 40_000  # of all domains, workloads and phases
NEGLIGIBLE = 1e-7


@dataclass(frozen=True)
class Relaxation:
    """Optimum of the linear relaxation."""

    objective: float
    duals: Floats  # of rows
    waste: Floats  # reduced cost of a replica over the worth of its nodes
    values: Floats  # of all columns
    pool: Rows  # all replica columns that were tried


def relax(model: AllocationModel, program: Program, pool: Rows | None = None) -> Relaxation:
    """The relaxation of one program, from the replica columns of `pool` on."""
    relaxer = Relaxer(model)
    if pool is not None:
        relaxer.add(pool)
    return relaxer.solve(program)


class Relaxer:
    """Column generation over the replica columns of one model, by negative reduced cost.

    Programs of a model share its matrix, so each solve goes on from the columns and the basis of
    the last one.
    """

    def __init__(self, model: AllocationModel) -> None:
        self.model = model
        parts, program = model.parts, model.program
        self._by_row = program.matrix.T.tocsr()
        replicas = np.concatenate([parts.replicas, parts.load])
        self._order = np.setdiff1d(np.arange(program.columns), replicas)
        self._inside = np.zeros(program.columns, dtype=bool)
        self._lp = LinearProgram(program.of_columns(self._order))
        every = len(PHASES) * (len(model.data.workloads) + 1)
        self._group = model.domain[parts.replicas] * every + _workload_and_phase(model)
        self._load_rates = model.rates[model.template[parts.load], model.workload[parts.load]]
        groups = max(1, np.unique(self._group).size)
        self._per_group = max(1, min(COLUMNS_PER_ROUND, MOST_COLUMNS_PER_ROUND // groups))

    def solve(self, program: Program) -> Relaxation:
        """The optimum; every round prices all columns at once.

        A replica that serves several workloads is priced with the loads that would come with it.
        The program must be feasible with the columns that came in so far.
        """
        parts, lp = self.model.parts, self._lp
        lp.change(program, self._order)
        while True:
            answer = lp.solve()
            reduced = program.cost - self._by_row @ answer.duals
            priced = reduced[parts.replicas] + best_loads(self.model, reduced, self._load_rates)
            outside = (
                ~self._inside[parts.replicas] & (program.upper > program.lower)[parts.replicas]
            )
            candidates = np.flatnonzero((priced < -NEGLIGIBLE) & outside)
            if not candidates.size:
                break
            chosen = _most_negative(candidates, priced, self._group, self._per_group)
            self.add(parts.replicas[chosen], program)
        values = np.zeros(program.columns)
        if answer.values is not None:
            values[self._order] = answer.values
        nodes = np.zeros(program.row_lower.size)
        nodes[self.model.node_rows] = np.maximum(-answer.duals[self.model.node_rows], 0.0)
        worth = (self._by_row @ nodes)[parts.replicas]
        waste = priced / np.maximum(worth, 1e-9 * max(1.0, float(worth.max(initial=0.0))))
        pool = parts.replicas[self._inside[parts.replicas]]
        return Relaxation(answer.objective, answer.duals, waste, values, pool)

    def add(self, replicas: Rows, program: Program | None = None) -> None:
        """Replica columns that are not inside yet, with their loads; bounds are the program's."""
        loads = self.model.loads_of
        new = np.concatenate([replicas, *(loads[x] for x in replicas.tolist() if x in loads)])
        self._inside[replicas] = True
        self._lp.add_columns((program or self.model.program).of_columns(new))
        self._order = np.concatenate([self._order, new])


def best_loads(model: AllocationModel, reduced: Floats, rates_rps: Floats) -> Floats:
    """What the best load of each replica is worth, at most 0; rows of A4 are not there yet.

    `rates_rps` is what a replica serves at most of each load column, `reduced` goes over all
    columns and the answer over the replicas'.
    """
    best = np.zeros(model.parts.replicas.size)
    np.minimum.at(best, model.replica_of_load, rates_rps * reduced[model.parts.load])
    return best


def best_of_each(model: AllocationModel, replicas: Flags, cost: Floats, most: int) -> Flags:
    """Of some replicas the cheapest `most`, as many of every workload and phase.

    `replicas`, `cost` and the answer go over `model.parts.replicas`.
    """
    mine = np.flatnonzero(replicas)
    group = _workload_and_phase(model)[mine]
    order = np.lexsort((cost[mine], group))
    rank = np.empty(mine.size, dtype=np.intp)
    rank[order] = np.arange(mine.size) - np.searchsorted(group[order], group[order])
    chosen = np.zeros(replicas.size, dtype=bool)
    chosen[mine[np.lexsort((cost[mine], rank))[:most]]] = True
    return chosen


def _workload_and_phase(model: AllocationModel) -> Rows:
    """Workload and phase of every replica column as one number."""
    x = model.parts.replicas
    groups: Rows = (model.workload[x] + 1) * len(PHASES) + model.phases[model.template[x]]
    return groups


def _most_negative(candidates: Rows, priced: Floats, group: Rows, most: int) -> Rows:
    """Of each group the candidates of least reduced cost."""
    order = candidates[np.lexsort((priced[candidates], group[candidates]))]
    sorted_groups = group[order]
    first = np.searchsorted(sorted_groups, sorted_groups, side="left")
    return order[np.arange(order.size) - first < most]

"""A plan domain by domain: each is solved in integers at the relaxation's prices, then stays.

After every domain the relaxation over the others is solved anew, so what integers lose in one
domain the others make up for. Source: docs/formulation.md, section 5.2.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse

from planner.allocation.model import AllocationModel
from planner.allocation.relaxation import NEGLIGIBLE, Relaxation, Relaxer, best_of_each
from planner.perf.grids import Floats
from planner.programs import Flags, Program, Rows, solve_program

OPEN_SHARE = 0.17  # of the domains, left for one program at the end
DOMAIN_COLUMNS = 700  # replica columns of a domain's integer program
DOMAIN_S = 1.5  # of a domain's integer program, at most
LEAST_DOMAIN_S = 0.1
FAIR_SHARES = 2.0  # of the time left, for one domain
DOMAIN_GAP = 1e-3
# What it costs to take more or less of a priced row than the relaxation does, over its price: many
# plans of a domain are worth the same at the prices alone.
LEAN = 0.03


@dataclass(frozen=True)
class Dived:
    """Replicas of the domains that were solved, over all columns; the relaxation beside them."""

    base: Floats
    relaxation: Relaxation


def dive(
    model: AllocationModel,
    program: Program,
    relaxer: Relaxer,
    relaxation: Relaxation,
    deadline: float,
) -> Dived:
    """Domains of dear nodes first, all but the last few; about until perf_counter() is `deadline`.

    A domain without a plan beside those before it stays open.
    """
    lower, upper = program.lower.copy(), program.upper.copy()
    fixed = np.zeros(program.columns, dtype=bool)
    order = _dearest_first(model, relaxation)
    order = order[: len(order) - max(1, round(OPEN_SHARE * len(order)))]
    for number, domain in enumerate(order):
        fair = (deadline - time.perf_counter()) / (len(order) - number)
        seconds = min(DOMAIN_S, max(LEAST_DOMAIN_S, FAIR_SHARES * fair))
        mine = model.domain == domain
        columns = _columns_of(model, relaxation, mine)
        values = _solve_domain(model, program, relaxation, mine, fixed, columns, seconds)
        if values is None:
            continue
        whole = mine & program.integer
        kept = lower[whole], upper[whole]
        columns = columns[program.integer[columns]]
        lower[whole] = upper[whole] = 0.0
        lower[columns] = upper[columns] = values
        found = relaxer.solve(replace(program, lower=lower, upper=upper))
        if np.isfinite(found.objective):
            relaxation = found
            fixed |= mine
        else:
            lower[whole], upper[whole] = kept
    return Dived(np.where(fixed & model.is_replica, lower, 0.0), relaxation)


def _dearest_first(model: AllocationModel, relaxation: Relaxation) -> list[int]:
    """Domains by the mean cost of the nodes that the relaxation rents: how coarse they are."""
    nodes = model.parts.nodes
    domain, rented = model.domain[nodes], relaxation.values[nodes]
    count = len(model.domains)
    cost = np.bincount(domain, rented * model.program.cost[nodes], count)
    mean = cost / np.maximum(np.bincount(domain, rented, count), NEGLIGIBLE)
    return [int(r) for r in np.argsort(-mean, kind="stable")]


def _columns_of(model: AllocationModel, relaxation: Relaxation, mine: Flags) -> Rows:
    """Of a domain's replicas the thrifty ones of every workload and phase; all other columns."""
    x = model.parts.replicas
    chosen = best_of_each(model, mine[x], relaxation.waste, DOMAIN_COLUMNS // 2)
    waste = np.where(mine[x] & ~chosen, relaxation.waste, np.inf)
    thrifty = np.argsort(waste, kind="stable")[: DOMAIN_COLUMNS // 2]
    chosen[thrifty[np.isfinite(waste[thrifty])]] = True
    chosen |= mine[x] & (relaxation.values[x] > NEGLIGIBLE)
    replicas = x[chosen]
    loads = [model.loads_of[n] for n in replicas.tolist() if n in model.loads_of]
    rest = mine & ~model.is_replica
    rest[model.parts.load] = False
    return np.sort(np.concatenate([replicas, *loads, np.flatnonzero(rest)]))


def _solve_domain(
    model: AllocationModel,
    program: Program,
    relaxation: Relaxation,
    mine: Flags,
    fixed: Flags,
    columns: Rows,
    seconds: float,
) -> Floats | None:
    """Values of the integer ones of a domain's columns.

    Rows that other columns have a part in are priced: with u what the relaxation uses of one here
    and pi its price, the domain pays -pi for every unit, and LEAN |pi| for each away from u.
    """
    chosen = program.of_columns(columns)
    touched = np.unique(chosen.matrix.indices).astype(np.intp)
    others = np.unique(program.matrix[:, np.flatnonzero(~mine)].indices)
    shared = np.isin(touched, others)
    own, priced = touched[~shared], touched[shared]
    use = chosen.matrix[priced] @ relaxation.values[columns]
    price = relaxation.duals[priced]
    count, eye = priced.size, sparse.eye_array(priced.size, format="csc")
    nothing, lean = sparse.csc_array((own.size, count)), LEAN * np.abs(price)
    part = Program(
        sparse.block_array(
            [[chosen.matrix[own], nothing, nothing], [chosen.matrix[priced], -eye, eye]],
            format="csc",
        ),
        np.concatenate([chosen.cost, lean - price, lean + price]),
        np.concatenate([chosen.lower, np.zeros(2 * count)]),
        np.concatenate(
            [
                chosen.upper,
                _most_more(model, program, relaxation, mine, fixed)[priced],
                np.full(count, np.inf),
            ]
        ),
        np.concatenate([program.row_lower[own], use]),
        np.concatenate([program.row_upper[own], use]),
        np.concatenate([chosen.integer, np.zeros(2 * count, dtype=bool)]),
    )
    found = solve_program(part, time_limit_s=seconds, relative_gap=DOMAIN_GAP)
    if found.values is None:
        return None
    values: Floats = np.rint(found.values[: columns.size][chosen.integer])
    return values


def _most_more(
    model: AllocationModel, program: Program, relaxation: Relaxation, mine: Flags, fixed: Flags
) -> Floats:
    """How much more of every row than in the relaxation a domain may use.

    Of a demand what open domains serve, or nobody; of a limit what is left of it.
    """
    more = program.row_upper - program.matrix @ relaxation.values
    settled = program.matrix @ np.where(mine | fixed, relaxation.values, 0.0)
    demand = model.demand_rows
    more[demand] = program.row_lower[demand] - settled[demand]
    at_least_none: Floats = np.maximum(more, 0.0)
    return at_least_none

"""Solve an allocation and read the plan back.

Scarcity comes first: the least weighted shortfall, then the least cost among the plans that have
it (lexicographic). `columns.py` does it in production; `full_model.py` is the reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from planner.allocation.assemble import Steps, assemble, planned_nodes
from planner.allocation.check import PlanCheckError
from planner.allocation.columns import plan_by_columns
from planner.allocation.full_model import plan_with_full_model
from planner.allocation.plan import Plan, Worth
from planner.allocation.problem import AllocationInput, NodeKey, node_key
from planner.errors import InfeasiblePlanError
from planner.solver import Outcome, SolveReport


def plan_allocation(
    data: AllocationInput,
    start: Plan | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """The cheapest plan among those of least weighted shortfall.

    `start` is a plan of the same workloads, templates and offers to begin from. The gap of a plan
    is the larger of its two steps' relative gaps; the shortfall's is relative to the weighted
    demand. `clock` only measures how long the solve took. The plan is rechecked on its integers
    before it is returned.
    Raises LeastServedError: a least served share that no plan reaches. SolverStoppedError: the
    deadline passed without any plan.
    """
    solver = plan_by_columns if data.settings.solver == "columns" else plan_with_full_model
    return solver(data, start, clock)


def keep_running(
    data: AllocationInput,
    replicas: Mapping[tuple[str, str], int],
    nodes: Mapping[NodeKey, int],
) -> Plan | None:
    """A running plan under today's prices, demand and offers; None if they no longer allow it.

    `replicas` counts by (template id, domain). Nothing starts or ends; only the loads may change.
    """
    offers = {node_key(offer): offer for offer in data.offers}
    known = {template.id: index for index, template in enumerate(data.templates)}
    if not nodes.keys() <= offers.keys() or any(key not in known for key, _ in replicas):
        return None
    counts = {(known[key], domain): count for (key, domain), count in replicas.items()}
    planned = planned_nodes(data, nodes)
    unsolved = SolveReport(Outcome.INCUMBENT, 0.0, 0.0, 0.0)
    try:
        return assemble(data, counts, planned, Worth(), Steps(unsolved, unsolved), 0.0)
    except (PlanCheckError, InfeasiblePlanError):  # less stock, a new quota or rule
        return None

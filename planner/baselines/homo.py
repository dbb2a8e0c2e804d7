"""Homo: every replica on one node class, workloads planned one after another on what is left."""

from __future__ import annotations

from planner.allocation.problem import AllocationInput
from planner.allocation.solve import plan_allocation
from planner.baselines.homo_joint import with_pure_templates
from planner.baselines.sequential import Orders, plan_in_orders


def plan_homo(data: AllocationInput, max_nodes: int | None = None) -> Orders:
    """Plans of several orders; `max_nodes` is of one replica (None: what the library has).

    Each workload's own program is Homo-joint's.
    """
    return plan_in_orders(with_pure_templates(data, max_nodes), plan_allocation)

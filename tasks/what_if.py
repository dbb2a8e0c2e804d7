"""Plan today's input and a changed one, and say what differs; nothing is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput
from planner.allocation.solve import keep_running, plan_allocation
from tasks import progress
from tasks.allocation import allocation_input, latest_plan, read_library
from tasks.changes import change_input
from tasks.home import open_catalog
from tasks.inputs import load_inputs
from tasks.scenario_file import read_scenario


@dataclass(frozen=True, slots=True)
class NodeChange:
    """Nodes of one class in one domain, before and after."""

    domain: str
    node_class: str
    now: int
    then: int


@dataclass(frozen=True)
class WhatIf:
    """Two plans of one scenario."""

    scenario: str
    files: tuple[str, ...]
    now: Plan
    then: Plan

    @property
    def changes(self) -> tuple[NodeChange, ...]:
        """Where the number of nodes differs, largest difference first."""
        now, then = _nodes(self.now), _nodes(self.then)
        found = [
            NodeChange(*place, now.get(place, 0), then.get(place, 0))
            for place in sorted(now.keys() | then.keys())
            if now.get(place, 0) != then.get(place, 0)
        ]
        return tuple(sorted(found, key=lambda c: -abs(c.then - c.now)))


def what_if(scenario: str, files: Sequence[Path], home: str | None = None) -> WhatIf:
    """Plan a scenario as it is and as the files change it, both from the latest plan on.

    Raises WhatIfError: a file that can't be used. NoTemplateError: the library is not there.
    """
    catalog, spec = open_catalog(home), read_scenario(scenario)
    inputs = load_inputs(catalog, spec)
    data = allocation_input(inputs, read_library(catalog, inputs))
    changed = change_input(data, files)
    progress.report("plan", 0, 2)
    now = plan_allocation(data, latest_plan(catalog, data, spec.name))
    progress.report("plan", 1, 2)
    then = plan_allocation(changed, _carried(changed, now))
    progress.report("plan", 2, 2)
    return WhatIf(spec.name, tuple(map(str, files)), now, then)


def _carried(data: AllocationInput, plan: Plan) -> Plan | None:
    """The plan under the changed input, if that allows it."""
    return keep_running(data, plan.replica_counts, plan.node_counts)


def _nodes(plan: Plan) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for nodes in plan.nodes:
        place = (nodes.offer.domain, nodes.offer.node_class)
        counts[place] = counts.get(place, 0) + nodes.count
    return counts

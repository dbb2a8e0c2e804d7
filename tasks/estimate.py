"""How much work a library build is, before it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass

from catalog import reads
from catalog.store import Catalog
from planner.errors import InputError
from planner.placement.combinations import count_multisets
from tasks.inputs import Inputs
from tasks.solving import connected_workers

# Of one combination with so many nodes, on one core of the machine that docs/operations.md names:
# `python -m bench.library --scenario extended`, all phases together.
SECONDS_BY_NODES = {1: 1e-4, 2: 2e-4, 3: 4e-4, 4: 6e-4, 5: 8e-4, 6: 1.4e-3, 7: 3e-3, 8: 7e-3}
ILP_SECONDS_BY_NODES = {1: 0.01, 2: 0.1, 3: 0.3, 4: 1.0, 5: 4.0, 6: 15.0, 7: 60.0, 8: 240.0}
LONG_BUILD_S = 600.0
MOST_COMBINATIONS = 200_000
MOST_ENUMERATED = 2_000_000  # of one phase, without asking


class LargeBuildError(InputError):
    """A build of many combinations or hours, that nobody confirmed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a build has to do."""

    scenario: str
    combinations: int  # not in the catalog yet
    seconds: float
    workers: int
    exactly: bool  # False where they are too many even to list

    @property
    def is_large(self) -> bool:
        return self.combinations > MOST_COMBINATIONS or self.seconds > LONG_BUILD_S

    def describe(self) -> str:
        """'scenario 'x' has 1,644,267 combinations to solve: about 14 minutes on 2 workers'."""
        number = f"{self.combinations:,}" if self.exactly else f"up to {self.combinations:,}"
        return (
            f"scenario {self.scenario!r} has {number} combinations to solve: about "
            f"{_duration(self.seconds)} on {self.workers} workers"
        )


def estimate_build(
    catalog: Catalog, inputs: Inputs, address: str | None = None, workers: int | None = None
) -> Estimate:
    """Count what is not stored yet, and how long it takes."""
    placement = inputs.scenario.placement
    number = connected_workers(address) if address else (workers or os.cpu_count() or 1)
    if workers == 0 and not address:
        number = 1
    costs = SECONDS_BY_NODES if placement.solver == "exact" else ILP_SECONDS_BY_NODES
    most = count_multisets(len(inputs.scenario.node_classes), placement.max_nodes)
    if most > MOST_ENUMERATED:
        total = most * len(inputs.phases)
        seconds = total * costs[placement.max_nodes] / number
        return Estimate(inputs.scenario.name, total, seconds, number, exactly=False)
    total, seconds = 0, 0.0
    with catalog.read() as connection:
        fresh = not reads.any_solutions(connection)
        for phase in inputs.phases:
            for members in phase.combinations.by_size:
                stored = 0
                if not fresh:
                    stored = reads.count_solutions(connection, phase.problem.keys(members))
                left = len(members) - stored
                total += left
                seconds += left * costs[members.shape[1]]
    return Estimate(inputs.scenario.name, total, seconds / number, number, exactly=True)


def refuse_large(estimate: Estimate) -> None:
    """Raise LargeBuildError unless the build is small."""
    if estimate.is_large:
        raise LargeBuildError(
            f"{estimate.describe()}; pass --yes to start, or lower placement.max_nodes or "
            "placement.memory_ratio"
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 172_800 else f"{seconds / 86_400:,.0f} days"

"""Coral's allocation against the full model over the fixed suite, under one deadline.

    python -m bench.allocation --scenario suite --deadline 60 --json

Both sides run one after the other in this process on the same inputs. Costs are compared where
the shortfalls are equal; else who serves more is better. `speedup` is the full model's time to its
final plan over Coral's time to a plan at least as good; `speedups` counts the instances that have
one. Coral's blocks use all cores, HiGHS on the full model one.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from bench.scenarios import suite_arguments, suite_inputs
from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput
from planner.allocation.solve import plan_allocation
from planner.errors import SolverStoppedError
from tasks.suite import Instance

TOLERANCE = 1e-4  # of the demand, and of the cost


@dataclass(frozen=True)
class Pair:
    """Both plans of one instance; None where the full model found none."""

    instance: Instance
    data: AllocationInput
    coral: Plan
    full: Plan | None
    full_s: float

    @property
    def not_worse(self) -> bool:
        if self.full is None:
            return True
        return self._as_good(self.coral.weighted_shortfall, self.coral.objective_usd)

    @property
    def speedup(self) -> float | None:
        """None where Coral's plan is worse, or the full model has none."""
        if self.full is None:
            return None
        reached = [s for s, short, cost in self.coral.history if self._as_good(short, cost)]
        if not reached:
            return None
        best = self.full.history[-1][0] if self.full.history else self.full_s
        return best / max(reached[0], 1e-3)

    def _as_good(self, short: float, cost_usd: float) -> bool:
        if self.full is None:
            return True
        spare = self.full.weighted_shortfall - short
        slack = TOLERANCE * self.data.weighted_demand
        if abs(spare) > slack:
            return spare > 0
        return cost_usd <= self.full.objective_usd * (1 + TOLERANCE)

    def row(self) -> dict[str, object]:
        coral, full = self.coral, self.full
        share = None if full is None else full.weighted_shortfall / self.data.weighted_demand
        return {
            "instance": self.instance.id,
            "stratum": self.instance.stratum,
            "columns": coral.columns_seen,
            "short": coral.weighted_shortfall / self.data.weighted_demand,
            "cost_usd": coral.objective_usd,
            "gap": coral.gap,
            "shortfall_gap": coral.shortfall_gap,
            "coral_s": coral.solve_s,
            "full_short": share,
            "full_cost_usd": None if full is None else full.objective_usd,
            "not_worse": self.not_worse,
            "speedup": self.speedup,
        }


def compare(instance: Instance, data: AllocationInput) -> Pair:
    """Solve one instance on both sides."""
    coral = plan_allocation(data)
    started = time.perf_counter()
    reference = replace(data, settings=replace(data.settings, solver="full"))
    try:
        full = plan_allocation(reference)
    except SolverStoppedError:
        full = None
    return Pair(instance, data, coral, full, time.perf_counter() - started)


def summary(pairs: list[Pair]) -> dict[str, object]:
    """The figures that the benchmark is run for."""
    gaps, shortfall_gaps = defaultdict(list), defaultdict(list)
    for pair in pairs:
        gaps[pair.instance.stratum].append(pair.coral.gap)
        shortfall_gaps[pair.instance.stratum].append(pair.coral.shortfall_gap)
    speedups = [pair.speedup for pair in pairs if pair.speedup is not None]
    return {
        "instances": len(pairs),
        "columns": max(pair.coral.columns_seen for pair in pairs),
        "not_worse": sum(pair.not_worse for pair in pairs),
        "speedups": len(speedups),  # instances where both have a plan and Coral's is as good
        "speedup": round(statistics.median(speedups), 1) if speedups else None,
        "coral_s": round(statistics.median(pair.coral.solve_s for pair in pairs), 2),
        "gap": {name: round(statistics.median(found), 4) for name, found in gaps.items()},
        "shortfall_gap": {
            name: round(statistics.median(found), 4) for name, found in shortfall_gaps.items()
        },
    }


def main() -> None:
    """Parse, solve, print."""
    parser = suite_arguments(__doc__, deadline_s=60.0)
    options = parser.parse_args()
    pairs, console = [], Console(stderr=True)
    with suite_inputs(options.scenario, options.home, options.deadline, options.only) as instances:
        for instance, data in instances:
            pairs.append(compare(instance, data))
            console.print(pairs[-1].row(), soft_wrap=True)
    if not pairs:
        parser.error(f"no instance has {options.only!r} in its name")
    rows = [pair.row() for pair in pairs]
    if options.json:
        print(json.dumps({**summary(pairs), "deadline_s": options.deadline, "rows": rows}))
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=200).print(table)
    Console().print(summary(pairs))


if __name__ == "__main__":
    main()

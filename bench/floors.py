"""What knowing the best split before solving a combination saves.

    python -m bench.floors --scenario core --nmax 4 --json

Solves the same combinations twice in this process, with and without floors, and checks that the
same ones come out worth a template.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from bench.scenarios import inputs_of
from planner.placement.combinations import SplitFloors
from planner.placement.exact import ExactSolver
from tasks.inputs import PhaseInputs


def main() -> None:
    """Parse, run both sides, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scenario", default="core")
    parser.add_argument("--nmax", type=int, default=4, help="nodes of a combination")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    inputs = inputs_of(options.scenario, options.nmax)
    for phase in inputs.phases[:3]:
        run(phase, True)  # compiles, where no earlier run left the machine code
    found = {
        side: [run(phase, side == "floors") for phase in inputs.phases]
        for side in ("plain", "floors")
    }
    result: dict[str, object] = {
        "scenario": options.scenario,
        "nmax": options.nmax,
        "combinations": sum(len(phase.combinations) for phase in inputs.phases),
    }
    for side, runs in found.items():
        result[f"{side}_s"] = round(sum(seconds for seconds, _, _ in runs), 2)
        result[f"{side}_searches"] = sum(searches for _, searches, _ in runs)
    same = all(a[2] == b[2] for a, b in zip(found["plain"], found["floors"], strict=True))
    result["same_templates"] = same
    result["speedup"] = round(
        sum(s for s, _, _ in found["plain"]) / sum(s for s, _, _ in found["floors"]), 2
    )
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


def run(phase: PhaseInputs, with_floors: bool) -> tuple[float, int, list[int]]:
    """Seconds, searches, and which combinations are worth a template."""
    levels = phase.combinations.by_size
    solver = ExactSolver(phase.problem, len(levels))
    floors = SplitFloors(len(phase.problem.names), len(levels))
    kept: list[int] = []
    searches, started = 0, time.perf_counter()
    for members in levels:
        least = floors.floors(members)
        solved = solver.solve(members, least if with_floors else np.zeros(len(members)))
        best = np.maximum(solved.best_rps, least)
        worth = solved.best_rps > least * (1.0 + phase.problem.least_gain)
        kept += np.flatnonzero(worth).tolist()
        searches += int(solved.searches.sum())
        floors.record(members, best)
    return time.perf_counter() - started, searches, kept


if __name__ == "__main__":
    main()

"""What knowing the best split before solving a combination saves.

    python -m bench.floors --scenario core --nmax 2 --json

Solves the same combinations twice in this process, with and without floors, and checks that the
same ones come out worth a template.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from catalog.store import Catalog
from planner.placement.combinations import split_floor
from planner.placement.search import RELATIVE_TOLERANCE, best_placement
from planner.placement.stages import StageTable
from planner.types import Combination
from tasks.inputs import PhaseInputs, load_inputs
from tasks.scenario_file import read_scenario


def main() -> None:
    """Parse, run both sides, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scenario", default="core")
    parser.add_argument("--nmax", type=int, default=2, help="nodes of a combination")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    spec = read_scenario(options.scenario)
    placement = spec.placement.model_copy(update={"max_nodes": options.nmax})
    with tempfile.TemporaryDirectory() as home:
        inputs = load_inputs(Catalog(Path(home)), spec.model_copy(update={"placement": placement}))
    found = {
        side: [run(phase, side == "floors") for phase in inputs.phases]
        for side in ("plain", "floors")
    }
    result: dict[str, object] = {
        "scenario": spec.name,
        "nmax": options.nmax,
        "combinations": sum(len(phase.combinations) for phase in inputs.phases),
    }
    for side, runs in found.items():
        result[f"{side}_s"] = round(sum(seconds for seconds, _, _ in runs), 2)
        result[f"{side}_ilps"] = sum(ilps for _, ilps, _ in runs)
    same = all(a[2] == b[2] for a, b in zip(found["plain"], found["floors"], strict=True))
    result["same_templates"] = same
    result["speedup"] = round(
        sum(s for s, _, _ in found["plain"]) / sum(s for s, _, _ in found["floors"]), 2
    )
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


def run(phase: PhaseInputs, floors: bool) -> tuple[float, int, set[Combination]]:
    """Seconds, ILPs and the combinations worth a template."""
    table = StageTable(phase.problem)
    best: dict[Combination, float] = {}
    kept, ilps, started = set(), 0, time.perf_counter()
    for combination in phase.combinations:
        floor = split_floor(combination, best)
        solution = best_placement(table, combination, floor if floors else 0.0)
        ilps += solution.ilps
        rps = solution.placement.raw_rps if solution.placement else 0.0
        if rps > floor * (1.0 + RELATIVE_TOLERANCE):
            kept.add(combination)
        best[combination] = max(floor, rps)
    return time.perf_counter() - started, ilps, kept


if __name__ == "__main__":
    main()

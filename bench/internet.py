"""The scenario `internet`: its library where the home lacks it, and one plan of Coral's.

    python -m bench.internet --json [--home FOLDER] [--deadline 60]

`library_s` is the time of a library from nothing (null where the home had parts of it), `read_s`
what reading the scenario and the library takes, `solve_s` the plan with the model built.
`stock_share` is the share of the GPUs in stock that the plan rents. Peaks are resident memory: of
the library's build with its workers, and of this process to the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.library import PeakMemory
from catalog.store import Catalog
from planner.allocation.problem import AllocationInput, stock_key
from planner.allocation.solve import plan_allocation
from tasks.allocation import allocation_input, read_library
from tasks.inputs import load_inputs
from tasks.library import build_phase
from tasks.scenario_file import read_scenario
from tasks.solving import Solvers


def main() -> None:
    """Parse, build what is missing, plan, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scenario", default="internet")
    parser.add_argument("--home", help="a Coral home whose library is used")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds of the plan")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["PREFECT_LOGGING_ROOT_LEVEL"] = "CRITICAL"  # workers log every start and stop
    with tempfile.TemporaryDirectory() as folder:
        result = run(Catalog(Path(options.home or folder)), options.scenario, options.deadline)
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


def run(catalog: Catalog, scenario: str, deadline_s: float) -> dict[str, object]:
    """All figures of one run."""
    memory = PeakMemory()
    memory.start()
    started = time.perf_counter()
    inputs = load_inputs(catalog, read_scenario(scenario))
    with Solvers(kind=inputs.scenario.placement.solver) as solvers:
        phases = [build_phase(catalog, phase, solvers) for phase in inputs.phases]
    library_s = time.perf_counter() - started
    memory.done.set()
    memory.join()
    started = time.perf_counter()
    inputs = load_inputs(catalog, read_scenario(scenario))
    data = allocation_input(inputs, read_library(catalog, inputs))
    read_s = time.perf_counter() - started
    data = replace(data, settings=replace(data.settings, deadline_s=deadline_s))
    started = time.perf_counter()
    plan = plan_allocation(data)
    solve_s = time.perf_counter() - started
    rented = sum(nodes.count * nodes.offer.gpus for nodes in plan.nodes)
    return {
        "scenario": inputs.scenario.name,
        "models": len(data.workloads),
        "node_classes": len(inputs.scenario.node_classes),
        "domains": len(data.domains),
        "offers": len(data.offers),
        "combinations": sum(built.combinations for built in phases),
        "templates": len(data.templates),
        "columns": plan.columns_seen,
        "library_s": None if any(built.reused for built in phases) else round(library_s, 1),
        "library_peak_gib": round(memory.peak_bytes / 2**30, 2),
        "read_s": round(read_s, 1),
        "solve_s": round(solve_s, 1),
        "gap": round(plan.gap, 4),
        "bound_usd": round(plan.bound_usd, 2),
        "objective_usd": round(plan.objective_usd, 2),
        "cost_usd_per_hour": round(plan.cost_usd_per_hour, 2),
        "served_share": plan.served_share,
        "gpus_rented": rented,
        "stock_share": round(rented / _gpus_in_stock(data), 3),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "phase_seconds": {name: round(s, 1) for name, s in plan.phase_seconds.items()},
    }


def _gpus_in_stock(data: AllocationInput) -> int:
    """Spot and on-demand offers of one domain and type share a stock."""
    return sum({stock_key(offer): offer.stock * offer.gpus for offer in data.offers}.values())


if __name__ == "__main__":
    main()

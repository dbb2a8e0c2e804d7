"""How long a scenario's template library takes, from nothing, in a home of its own.

    python -m bench.library --scenario extended --nmax 4 --json

`pruned` combinations needed bounds alone, `solved` ones a search. `peak_mib` adds up this process
and its Dask workers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path

import psutil

from catalog.store import Catalog
from flows.build_library import LibraryResult
from planner.scenario import with_caps
from tasks.inputs import load_inputs
from tasks.library import build_phase
from tasks.scenario_file import read_scenario
from tasks.solving import Solvers


class PeakMemory(threading.Thread):
    """Largest resident memory of this process and its children, sampled five times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self.done = threading.Event()

    def run(self) -> None:
        me = psutil.Process()
        while not self.done.wait(0.2):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak_bytes = max(self.peak_bytes, total)


def main() -> None:
    """Parse, build, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scenario", default="core")
    parser.add_argument("--nmax", type=int, default=3, help="nodes of a combination")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="Dask workers")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["PREFECT_LOGGING_ROOT_LEVEL"] = "CRITICAL"  # workers log every start and stop
    spec = read_scenario(options.scenario)
    memory = PeakMemory()
    memory.start()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        catalog = Catalog(Path(home))
        changed = with_caps(spec, options.nmax, spec.placement.memory_ratio)
        inputs = load_inputs(catalog, changed)
        phases = []
        with Solvers(workers=options.workers, kind=inputs.scenario.placement.solver) as solvers:
            for phase in inputs.phases:
                phases.append(build_phase(catalog, phase, solvers))
                if not options.json:
                    built = phases[-1]
                    print(f"{built.phase} {built.workload}: {built.kept} of {built.combinations} "
                          f"in {built.seconds:.1f} s", flush=True)  # fmt: skip
        database_mib = catalog.database.stat().st_size / 2**20
    seconds = time.perf_counter() - started
    memory.done.set()
    memory.join()
    library = LibraryResult(spec.name, tuple(phases), seconds)
    result = {
        "scenario": spec.name,
        "nmax": options.nmax,
        "workers": options.workers,
        "combinations": sum(built.combinations for built in phases),
        "pruned": sum(built.pruned for built in phases),
        "solved": sum(built.searched for built in phases),
        "kept": library.templates,
        "seconds": round(seconds, 1),
        "peak_mib": round(memory.peak_bytes / 2**20),
        "database_mib": round(database_mib),
        "outcomes": library.outcomes,
    }
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()

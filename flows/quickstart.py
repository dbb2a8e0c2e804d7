"""The main path in one run: library, allocation, and the plan in simulation."""

from __future__ import annotations

from dataclasses import dataclass

from flows.allocate import AllocationResult, allocate
from flows.build_library import LibraryResult, build_library
from flows.parameters import Dask, Home, Scenario, Workers
from flows.simulate import simulate
from tasks.compiling import compiling_aside
from tasks.recording import coral_flow
from tasks.simulation import Simulation

SIMULATED_MINUTES = 3.0


@dataclass(frozen=True)
class QuickstartResult:
    """The library, the plan, and what it does under requests."""

    library: LibraryResult
    allocation: AllocationResult
    simulation: Simulation


@coral_flow("quickstart")
def quickstart(
    scenario: Scenario = "core",
    home: Home = None,
    dask: Dask = None,
    workers: Workers = None,
) -> QuickstartResult:
    """Build what is missing of the library, plan with it, and simulate the plan for a while."""
    with compiling_aside():
        library = build_library(scenario, home, dask, workers)
        allocation = allocate(scenario, home)
    simulation = simulate(scenario, home, minutes=SIMULATED_MINUTES)
    return QuickstartResult(library, allocation, simulation)

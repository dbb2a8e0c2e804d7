"""Build a scenario's library at larger caps and show what they are worth."""

from __future__ import annotations

import uuid

from flows.parameters import Dask, Home, Scenario, Workers
from planner.scenario import with_caps
from tasks.home import open_catalog
from tasks.inputs import load_inputs
from tasks.library import build_phase_task, record_builds
from tasks.opaque import opaque
from tasks.recording import coral_flow
from tasks.scenario_file import read_scenario
from tasks.sensitivity import Sensitivity, measure_sensitivity_task
from tasks.solving import Solvers


@coral_flow("library-sensitivity")
def library_sensitivity(
    scenario: Scenario = "core",
    home: Home = None,
    max_nodes: int = 6,
    memory_ratio: float = 16.0,
    dask: Dask = None,
    workers: Workers = None,
) -> Sensitivity:
    """Best tokens per dollar by nodes and memory of a replica.

    Args:
        max_nodes: Sweep N_max from 1 to this.
        memory_ratio: Sweep rho from 2 to this.
    """
    catalog = open_catalog(home)
    inputs = load_inputs(catalog, with_caps(read_scenario(scenario), max_nodes, memory_ratio))
    with Solvers(dask, workers, inputs.scenario.placement.solver) as solvers:
        built = [build_phase_task(catalog, opaque(p), opaque(solvers)) for p in inputs.phases]
    record_builds(catalog, uuid.uuid4().hex, inputs.scenario.name, built)
    found: Sensitivity = measure_sensitivity_task(catalog, opaque(inputs))
    return found

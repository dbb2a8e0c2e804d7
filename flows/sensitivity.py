"""Build a scenario's library at larger caps and show what they are worth."""

from __future__ import annotations

import uuid

from prefect import flow

from planner.scenario import with_caps
from tasks.home import open_catalog
from tasks.inputs import load_inputs
from tasks.library import build_phase_task, record_builds
from tasks.opaque import opaque
from tasks.scenario_file import read_scenario
from tasks.sensitivity import Sensitivity, measure_sensitivity_task
from tasks.solving import Solvers


@flow(name="library-sensitivity", validate_parameters=False)
def library_sensitivity(
    scenario: str = "core",
    home: str | None = None,
    max_nodes: int = 6,
    memory_ratio: float = 16.0,
    dask: str | None = None,
    workers: int | None = None,
) -> Sensitivity:
    """Best tokens per dollar for N_max up to `max_nodes` and rho up to `memory_ratio`."""
    catalog = open_catalog(home)
    inputs = load_inputs(catalog, with_caps(read_scenario(scenario), max_nodes, memory_ratio))
    with Solvers(dask, workers, inputs.scenario.placement.solver) as solvers:
        built = [build_phase_task(catalog, opaque(p), opaque(solvers)) for p in inputs.phases]
    record_builds(catalog, uuid.uuid4().hex, inputs.scenario.name, built)
    found: Sensitivity = measure_sensitivity_task(catalog, opaque(inputs))
    return found

"""Serve requests with the latest plan, in simulation."""

from __future__ import annotations

from prefect import flow

from tasks.home import open_catalog
from tasks.inputs import load_inputs
from tasks.opaque import opaque
from tasks.scenario_file import read_scenario
from tasks.simulation import Load, Simulation, simulate_task


@flow(name="simulate", validate_parameters=False)
def simulate(
    scenario: str = "core",
    home: str | None = None,
    trace: str | None = None,
    minutes: float = 10.0,
    load: float = 1.0,
    seed: int = 0,
) -> Simulation:
    """Simulate Coral's latest plan of the scenario under a trace."""
    catalog = open_catalog(home)
    inputs = load_inputs(catalog, read_scenario(scenario))
    return simulate_task(catalog, opaque(inputs), Load(trace, minutes, load, seed))

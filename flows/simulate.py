"""Serve requests with the latest plan, in simulation."""

from __future__ import annotations

from pathlib import Path

from flows.parameters import Home, Scenario, Seed
from tasks.home import open_catalog
from tasks.inputs import load_inputs
from tasks.opaque import opaque
from tasks.recording import coral_flow
from tasks.requests import Load
from tasks.scenario_file import read_scenario
from tasks.simulation import Simulation, simulate_task


@coral_flow("simulate")
def simulate(
    scenario: Scenario = "core",
    home: Home = None,
    trace: str | None = None,
    minutes: float = 10.0,
    load: float = 1.0,
    seed: Seed = 0,
    own_lengths: bool = False,
    events: str | None = None,
) -> Simulation:
    """Simulate Coral's latest plan of the scenario under a trace.

    Args:
        trace: Shipped requests (a name, or a file); default: Poisson at the demand planned.
        minutes: Of requests.
        load: Factor on their rate.
        own_lengths: The arrivals of a trace, with the lengths of the scenario's workloads.
        events: A Parquet file to write, with one row per request.
    """
    catalog = open_catalog(home)
    inputs = load_inputs(catalog, read_scenario(scenario))
    asked = Load(trace, minutes, load, seed, own_lengths)
    return simulate_task(catalog, opaque(inputs), asked, Path(events) if events else None)

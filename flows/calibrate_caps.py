"""Find utilisation caps by simulation, so that plans attain their objectives at least cost."""

from __future__ import annotations

from flows.parameters import Home, Scenario, Seed
from tasks.calibration import Calibration, calibrate_task
from tasks.home import open_catalog
from tasks.inputs import load_inputs
from tasks.opaque import opaque
from tasks.recording import coral_flow
from tasks.requests import Load
from tasks.scenario_file import read_scenario


@coral_flow("calibrate-caps")
def calibrate_caps(
    scenario: Scenario = "core",
    home: Home = None,
    trace: str | None = None,
    minutes: float = 5.0,
    seed: Seed = 0,
    target: float = 0.95,
    rounds: int = 20,
) -> Calibration:
    """Plan and simulate in turn; the caps found are those of later plans of the scenario.

    Args:
        trace: Shipped requests (a name, or a file); default: Poisson at the demand planned.
        minutes: Of requests, of every simulation of a plan.
        target: Share of every workload's requests that must meet both objectives.
        rounds: Plans to try at most.
    """
    catalog = open_catalog(home)
    inputs = load_inputs(catalog, read_scenario(scenario))
    load = Load(trace, minutes, 1.0, seed)
    found: Calibration = calibrate_task(catalog, opaque(inputs), load, target, rounds)
    return found

"""Find utilisation caps by simulation, so that plans attain their objectives at least cost."""

from __future__ import annotations

from prefect import flow

from tasks.calibration import Calibration, calibrate_task
from tasks.home import open_catalog
from tasks.inputs import load_inputs
from tasks.opaque import opaque
from tasks.requests import Load
from tasks.scenario_file import read_scenario


@flow(name="calibrate-caps", validate_parameters=False)
def calibrate_caps(
    scenario: str = "core",
    home: str | None = None,
    trace: str | None = None,
    minutes: float = 5.0,
    seed: int = 0,
    target: float = 0.95,
    rounds: int = 20,
) -> Calibration:
    """Plan and simulate in turn; the caps found are those of later plans of the scenario.

    `target` is the share of every workload's requests that must meet both objectives.
    """
    catalog = open_catalog(home)
    inputs = load_inputs(catalog, read_scenario(scenario))
    load = Load(trace, minutes, 1.0, seed)
    found: Calibration = calibrate_task(catalog, opaque(inputs), load, target, rounds)
    return found

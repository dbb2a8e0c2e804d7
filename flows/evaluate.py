"""Replay days of market, demand, plans and preemptions for Coral, Homo and Cauchy."""

from __future__ import annotations

from prefect import flow

from tasks.evaluation import Evaluation, Replay, evaluate_task
from tasks.home import open_catalog
from tasks.inputs import load_inputs
from tasks.opaque import opaque
from tasks.scenario_file import read_scenario


@flow(name="evaluate", validate_parameters=False)
def evaluate(
    scenario: str = "core",
    home: str | None = None,
    hours: float = 24.0,
    every_minutes: float = 30.0,
    demand: float = 1.0,
    seed: int = 0,
    deadline_s: float = 5.0,
) -> Evaluation:
    """Every planner plans the same moments from where its fleet stands, and serves the same
    requests in simulation. The spot market is synthetic, fitted to shipped real traces."""
    catalog = open_catalog(home)
    inputs = load_inputs(catalog, read_scenario(scenario))
    asked = Replay(hours, every_minutes, demand, seed, deadline_s)
    found: Evaluation = evaluate_task(catalog, opaque(inputs), asked)
    return found

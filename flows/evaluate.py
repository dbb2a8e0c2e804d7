"""Replay days of market, demand, plans and preemptions for Coral, Homo and Cauchy."""

from __future__ import annotations

from flows.parameters import Home, Scenario, Seed
from tasks.evaluation import Evaluation, Replay, evaluate_task
from tasks.home import open_catalog
from tasks.inputs import load_inputs
from tasks.opaque import opaque
from tasks.recording import coral_flow
from tasks.scenario_file import read_scenario


@coral_flow("evaluate", timeout_seconds=12 * 3600)
def evaluate(
    scenario: Scenario = "core",
    home: Home = None,
    hours: float = 24.0,
    every_minutes: float = 30.0,
    demand: float = 1.0,
    seed: Seed = 0,
    deadline_s: float = 5.0,
) -> Evaluation:
    """Every planner plans the same moments from where its fleet stands, and serves the same
    requests in simulation. The spot market is synthetic, fitted to shipped real traces.

    Args:
        hours: Length of the replay.
        every_minutes: Between two plans.
        demand: Factor on the scenario's demand.
        deadline_s: Seconds for one plan.
    """
    catalog = open_catalog(home)
    inputs = load_inputs(catalog, read_scenario(scenario))
    asked = Replay(hours, every_minutes, demand, seed, deadline_s)
    found: Evaluation = evaluate_task(catalog, opaque(inputs), asked)
    return found

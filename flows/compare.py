"""Compare Coral with the baselines, with the library in the catalog."""

from __future__ import annotations

from prefect import flow

from tasks.comparison import Comparison, compare_task
from tasks.home import open_catalog
from tasks.opaque import opaque
from tasks.scenario_file import read_scenario


@flow(name="compare", validate_parameters=False)
def compare(
    scenario: str = "core",
    home: str | None = None,
    suite: bool = False,
    sweep: str | None = None,
    ablate: bool = False,
    deadline_s: float = 10.0,
) -> Comparison:
    """Every planner on a scenario, over the fixed suite, or over a sweep of it.

    `sweep` is demand, stock or domains (the same stock over more of them); `ablate` switches
    Coral's levers off one by one instead of running the baselines; `deadline_s` is of one plan.
    """
    catalog = open_catalog(home)
    found: Comparison = compare_task(
        catalog, opaque(read_scenario(scenario)), suite=suite, sweep=sweep, ablate=ablate,
        deadline_s=deadline_s,
    )  # fmt: skip
    return found

"""Compare Coral with the baselines, with the library in the catalog."""

from __future__ import annotations

from flows.build_library import build_variant
from flows.parameters import Dask, Home, Scenario, Workers
from planner.scenario import with_whole_nodes
from tasks.allocation import read_library
from tasks.comparison import Comparison, compare_task, engines_of
from tasks.home import open_catalog
from tasks.inputs import load_inputs
from tasks.opaque import opaque
from tasks.recording import coral_flow
from tasks.scenario_file import read_scenario


@coral_flow("compare")
def compare(
    scenario: Scenario = "core",
    home: Home = None,
    suite: bool = False,
    sweep: str | None = None,
    only: str = "*",
    ablate: bool = False,
    engine: str = "both",
    deadline_s: float = 10.0,
    simulate_minutes: float = 2.0,
    dask: Dask = None,
    workers: Workers = None,
) -> Comparison:
    """Every planner on a scenario, over the fixed suite, or over a sweep of it.

    Args:
        suite: Over the fixed suite of markets and demands.
        sweep: demand, stock, or domains (the same stock over more of them).
        only: A shell pattern on the names of instances or values.
        ablate: Switch Coral's levers off one by one instead of running the baselines; builds the
            library without node options where it is not there yet.
        engine: any (all templates), vllm (those that stock vLLM runs), or both.
        deadline_s: Seconds for one plan.
        simulate_minutes: Of requests that every plan then serves in simulation; 0: none.
    """
    catalog, spec = open_catalog(home), read_scenario(scenario)
    if ablate:
        read_library(catalog, load_inputs(catalog, spec))  # is it there, before the other one
        build_variant(catalog, load_inputs(catalog, with_whole_nodes(spec)), dask, workers)
    found: Comparison = compare_task(
        catalog, opaque(spec), engines=engines_of(engine), suite=suite, sweep=sweep, only=only,
        ablate=ablate, deadline_s=deadline_s, simulate_minutes=simulate_minutes,
    )  # fmt: skip
    return found

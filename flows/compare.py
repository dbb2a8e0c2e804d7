"""Compare Coral with the baselines, with the library in the catalog."""

from __future__ import annotations

from prefect import flow

from flows.build_library import build_variant
from planner.scenario import with_whole_nodes
from tasks.allocation import read_library
from tasks.comparison import Comparison, compare_task, engines_of
from tasks.home import open_catalog
from tasks.inputs import load_inputs
from tasks.opaque import opaque
from tasks.scenario_file import read_scenario


@flow(name="compare", validate_parameters=False)
def compare(
    scenario: str = "core",
    home: str | None = None,
    suite: bool = False,
    sweep: str | None = None,
    only: str = "*",
    ablate: bool = False,
    engine: str = "both",
    deadline_s: float = 10.0,
    simulate_minutes: float = 2.0,
    dask: str | None = None,
    workers: int | None = None,
) -> Comparison:
    """Every planner on a scenario, over the fixed suite, or over a sweep of it.

    `sweep` is demand, stock or domains (the same stock over more of them); `only` is a shell
    pattern on the names of instances or values; `ablate` switches
    Coral's levers off one by one instead of running the baselines, and builds the library without
    node options where it is not there yet; `engine` is any (all templates), vllm or both;
    `deadline_s` is of one plan, which then serves `simulate_minutes` of requests in simulation (0:
    not). `dask` and `workers` are as in build-library.
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

"""Inputs of the benchmarks: a scenario's phases on the shipped data, in a home of their own."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from catalog.store import Catalog
from planner.allocation.problem import AllocationInput
from planner.scenario import ScenarioSpec, with_caps
from tasks.allocation import allocation_input, read_library
from tasks.inputs import Inputs, load_inputs
from tasks.library import build_phase, share_templates
from tasks.scenario_file import read_scenario
from tasks.solving import Solvers
from tasks.suite import Instance, read_suite


def inputs_of(scenario: str, max_nodes: int) -> Inputs:
    """A scenario with another N_max."""
    spec = read_scenario(scenario)
    changed = with_caps(spec, max_nodes, spec.placement.memory_ratio)
    with tempfile.TemporaryDirectory() as home:
        return load_inputs(Catalog(Path(home)), changed)


def built_library(spec: ScenarioSpec, home: Path) -> AllocationInput:
    """A scenario's allocation, whose library is built first where the home lacks it."""
    os.environ["PREFECT_LOGGING_ROOT_LEVEL"] = "CRITICAL"
    catalog = Catalog(home)
    inputs = load_inputs(catalog, spec)
    with Solvers(kind=inputs.scenario.placement.solver) as solvers:
        for phase in inputs.phases:
            build_phase(catalog, phase, solvers)
    share_templates(catalog, inputs.phases)
    return allocation_input(inputs, read_library(catalog, inputs))


@contextmanager
def suite_inputs(
    scenario: str, home: str | None, deadline_s: float, only: str
) -> Iterator[Iterator[tuple[Instance, AllocationInput]]]:
    """The suite's instances of a scenario, whose library is built first where it is not there."""
    spec, suite = read_scenario(scenario), read_suite()
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog(Path(home or folder))
        library = built_library(spec, catalog.home).templates

        def instances() -> Iterator[tuple[Instance, AllocationInput]]:
            for instance in suite.instances:
                if only in instance.id:
                    market = load_inputs(catalog, suite.scenario(spec, instance))
                    data = allocation_input(market, library)
                    settings = replace(data.settings, deadline_s=deadline_s, relative_gap=1e-3)
                    yield instance, replace(data, settings=settings)

        yield instances()


def suite_arguments(doc: str | None, deadline_s: float) -> argparse.ArgumentParser:
    """Options of a benchmark over the suite; what `suite_inputs` takes, and --json."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else "")
    parser.add_argument("--scenario", default="suite")
    parser.add_argument("--deadline", type=float, default=deadline_s, help="seconds of one plan")
    parser.add_argument("--home", help="a Coral home whose library is used")
    parser.add_argument("--only", default="", help="instances whose name has this in it")
    parser.add_argument("--json", action="store_true")
    return parser

"""Inputs of the benchmarks: a scenario's phases on the shipped data, in a home of their own."""

from __future__ import annotations

import tempfile
from pathlib import Path

from catalog.store import Catalog
from planner.scenario import with_caps
from tasks.inputs import Inputs, load_inputs
from tasks.scenario_file import read_scenario


def inputs_of(scenario: str, max_nodes: int) -> Inputs:
    """A scenario with another N_max."""
    spec = read_scenario(scenario)
    changed = with_caps(spec, max_nodes, spec.placement.memory_ratio)
    with tempfile.TemporaryDirectory() as home:
        return load_inputs(Catalog(Path(home)), changed)

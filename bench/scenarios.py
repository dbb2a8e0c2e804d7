"""Inputs of the benchmarks: a scenario's phases on the shipped data, in a home of their own."""

from __future__ import annotations

import tempfile
from pathlib import Path

from catalog.store import Catalog
from tasks.inputs import Inputs, load_inputs
from tasks.scenario_file import read_scenario


def inputs_of(scenario: str, max_nodes: int, **placement: object) -> Inputs:
    """A scenario with another N_max, and other placement options where given."""
    spec = read_scenario(scenario)
    changed = spec.placement.model_copy(update={"max_nodes": max_nodes, **placement})
    with tempfile.TemporaryDirectory() as home:
        return load_inputs(Catalog(Path(home)), spec.model_copy(update={"placement": changed}))

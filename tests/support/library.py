"""Libraries that several tests plan with: built once, copied into the home of each."""

from __future__ import annotations

from pathlib import Path

from catalog.store import Catalog
from planner.scenario import ScenarioSpec
from tasks.inputs import load_inputs
from tasks.library import build_phase, share_templates
from tasks.solving import Solvers


def build_library(folder: Path, spec: ScenarioSpec) -> Path:
    """A database with the scenario's templates."""
    catalog = Catalog(folder)
    inputs = load_inputs(catalog, spec)
    with Solvers(workers=0) as solvers:
        for phase in inputs.phases:
            build_phase(catalog, phase, solvers)
    share_templates(catalog, inputs.phases)
    return catalog.database


def catalog_with(library: Path, home: Path) -> Catalog:
    """A home of its own with such a database."""
    home.mkdir(exist_ok=True)
    found = Catalog(home)
    found.database.write_bytes(library.read_bytes())
    return found

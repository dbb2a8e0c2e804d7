"""Build the template library of a scenario: every combination, streamed, resumable."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from catalog.store import Catalog
from flows.parameters import Dask, Home, Scenario, Workers
from tasks.home import open_catalog
from tasks.inputs import Inputs, load_inputs
from tasks.library import (
    PhaseLibrary,
    build_phase_task,
    record_builds,
    require_templates,
    share_templates_task,
)
from tasks.opaque import opaque
from tasks.recording import coral_flow
from tasks.scenario_file import read_scenario
from tasks.solving import Solvers


@dataclass(frozen=True)
class LibraryResult:
    """What a build came to."""

    scenario: str
    phases: tuple[PhaseLibrary, ...]
    seconds: float

    @property
    def templates(self) -> int:
        return sum(phase.kept for phase in self.phases)

    @property
    def outcomes(self) -> dict[str, int]:
        """Combinations by what became of them, those never solved included."""
        counts: Counter[str] = Counter()
        for phase in self.phases:
            counts.update(phase.outcomes)
            counts.update(phase.left_out)
        return dict(counts)


@coral_flow("build-library")
def build_library(
    scenario: Scenario = "core",
    home: Home = None,
    dask: Dask = None,
    workers: Workers = None,
) -> LibraryResult:
    """Solve the placement of every combination that the catalog does not hold yet."""
    started = time.perf_counter()
    catalog = open_catalog(home)
    inputs = load_inputs(catalog, read_scenario(scenario))
    phases: list[PhaseLibrary] = []
    with Solvers(dask, workers, inputs.scenario.placement.solver) as solvers:
        for _, group in groupby(inputs.phases, key=lambda phase: phase.workload.name):
            workload = list(group)
            built = [build_phase_task(catalog, opaque(p), opaque(solvers)) for p in workload]
            require_templates(workload, built, inputs.scenario.placement)
            phases += built
    finish_library(catalog, inputs, phases)
    return LibraryResult(inputs.scenario.name, tuple(phases), time.perf_counter() - started)


def build_variant(catalog: Catalog, inputs: Inputs, dask: str | None, workers: int | None) -> None:
    """The library of a variant of a scenario, in which a workload may have no template at all."""
    with Solvers(dask, workers, inputs.scenario.placement.solver) as solvers:
        built = [build_phase_task(catalog, opaque(p), opaque(solvers)) for p in inputs.phases]
    finish_library(catalog, inputs, built)


def finish_library(catalog: Catalog, inputs: Inputs, phases: Sequence[PhaseLibrary]) -> None:
    """What follows the phases of a build."""
    share_templates_task(catalog, opaque(inputs.phases))
    record_builds(catalog, uuid.uuid4().hex, inputs.scenario.name, phases)
    catalog.publish(force=True)

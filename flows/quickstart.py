"""The main path in one run: library, then allocation."""

from __future__ import annotations

from dataclasses import dataclass

from prefect import flow

from flows.allocate import AllocationResult, allocate
from flows.build_library import LibraryResult, build_library


@dataclass(frozen=True)
class QuickstartResult:
    """The library and the plan."""

    library: LibraryResult
    allocation: AllocationResult


@flow(name="quickstart", validate_parameters=False)
def quickstart(
    scenario: str = "core",
    home: str | None = None,
    dask: str | None = None,
    workers: int | None = None,
) -> QuickstartResult:
    """Build what is missing of the library, then plan with it."""
    library = build_library(scenario, home, dask, workers)
    return QuickstartResult(library, allocate(scenario, home))

"""Solve batches of combinations, here or on Dask workers.

Workers get a phase's numbers once and hand results back; only the flow touches the catalog.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import distributed

from planner.errors import CoralError
from planner.placement.evaluate import make_template
from planner.placement.profile import PhaseProblem
from planner.placement.search import best_placement
from planner.placement.stages import StageTable
from planner.types import Combination, Template

BATCHES_PER_WORKER = 6  # batches of seconds: enough to keep every worker busy to the end
LARGEST_BATCH = 32

Job = tuple[Combination, float]  # a combination and the throughput that it must beat


class SchedulerUnreachableError(CoralError):
    """The Dask scheduler named by the user does not answer."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Solved:
    """One combination's result."""

    combination: Combination
    floor_rps: float
    template: Template | None
    proven: bool
    ilps: int
    seconds: float


def solve_batch(problem: PhaseProblem, jobs: Sequence[Job]) -> list[Solved]:
    """Solve and recheck each combination of a batch."""
    table = _stage_table(problem)
    results = []
    for combination, floor in jobs:
        started = time.perf_counter()
        found = best_placement(table, combination, floor)
        template = None
        if found.placement is not None:
            template = make_template(problem, combination, found.placement)
        seconds = time.perf_counter() - started
        results.append(Solved(combination, floor, template, found.proven, found.ilps, seconds))
    return results


@dataclass
class Solvers:
    """Where batches are solved: a Dask cluster started on first use, or this process.

    `address` names a running scheduler; `workers` = 0 solves in this process.
    """

    address: str | None = None
    workers: int | None = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _client: Any = None

    def __enter__(self) -> Solvers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._client = None

    def run(self, problem: PhaseProblem, jobs: Sequence[Job]) -> Iterator[list[Solved]]:
        """Results of all jobs, batch by batch, as they come."""
        if self.workers == 0:
            for job in jobs:
                yield solve_batch(problem, [job])
            return
        client = self._connect()
        workers = max(1, len(client.scheduler_info(n_workers=-1)["workers"]))
        shared = client.scatter(problem, broadcast=True, hash=False)
        size = min(LARGEST_BATCH, max(1, len(jobs) // (BATCHES_PER_WORKER * workers)))
        futures = [
            client.submit(solve_batch, shared, jobs[start : start + size], pure=False)
            for start in range(0, len(jobs), size)
        ]
        for future in distributed.as_completed(futures):
            yield future.result()
            future.release()

    def _connect(self) -> Any:
        if self._client is None:
            logging.getLogger("distributed").setLevel(logging.ERROR)
            if self.address:
                try:
                    client = distributed.Client(self.address, timeout="10s")
                except (OSError, TimeoutError, ValueError) as error:
                    raise SchedulerUnreachableError(
                        f"no Dask scheduler answers at {self.address}; start one with "
                        "`dask scheduler`, or leave --dask out to use this machine"
                    ) from error
            else:
                cluster = self._stack.enter_context(
                    distributed.LocalCluster(
                        n_workers=self.workers or os.cpu_count() or 1,
                        threads_per_worker=1,
                        dashboard_address="127.0.0.1:0",
                        silence_logs=logging.ERROR,
                    )
                )
                client = distributed.Client(cluster)
            self._client = self._stack.enter_context(client)
        return self._client


_latest: StageTable | None = None


def _stage_table(problem: PhaseProblem) -> StageTable:
    """The table of this process's latest phase problem: batches of one phase share it."""
    global _latest
    if _latest is None or _latest.problem is not problem:
        _latest = StageTable(problem)
    return _latest

"""Solve batches of combinations, here or on Dask workers.

A batch carries its phase problem (a worker unpacks it once) and hands results back; only the flow
touches the catalog. Batches hold seconds of work and few are under way at a time, so a lost worker
costs its batch, and neither the scheduler nor the flow ever holds many results.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import distributed
import numpy as np
from numpy.typing import NDArray

import planner
from planner.errors import CoralError
from planner.perf.grids import Floats
from planner.placement.combinations import CombinationSet, Members
from planner.placement.evaluate import make_template
from planner.placement.exact import ExactSolver
from planner.placement.profile import PhaseProblem
from planner.placement.search import IlpSolver
from planner.placement.solution import PlacementSolver, Solved
from planner.sources import digest_of_sources
from planner.types import Template

BATCH_SECONDS = 4.0
FIRST_BATCH = {"exact": 64, "ilp": 1}  # combinations, before anything was measured
LARGEST_BATCH = 20_000
BATCHES_PER_WORKER = 2  # under way: one is solved, one waits
CLUSTER_AFTER_S = 20.0  # solved in this process; a cluster costs 5 s and its own tables
REACH_SCHEDULER_S = 10.0


class SchedulerUnreachableError(CoralError):
    """The Dask scheduler named by the user does not answer."""

    exit_code = 2


class SchedulerMismatchError(CoralError):
    """The Dask scheduler's workers are not of this Coral, or there are none."""

    exit_code = 2


class WorkersLostError(CoralError):
    """A batch's workers died again and again."""


@dataclass(frozen=True)
class Batch:
    """What came back of some rows of a level."""

    rows: NDArray[np.intp]
    solved: Solved
    templates: dict[int, Template]  # by position in `rows`
    seconds: float


def solver_for(problem: PhaseProblem, kind: str, max_nodes: int) -> PlacementSolver:
    """The solver that a scenario names."""
    return ExactSolver(problem, max_nodes) if kind == "exact" else IlpSolver(problem)


def solve_batch(
    solver: PlacementSolver, problem: PhaseProblem, members: Members, floors: Floats
) -> tuple[Solved, dict[int, Template], float]:
    """Solve and recheck combinations of one size; also the seconds it took."""
    started = time.perf_counter()
    solved = solver.solve(members, floors)
    combinations = CombinationSet(problem.names, (members,))
    templates = {
        row: make_template(problem, combinations.combination(members[row]), placement)
        for row, placement in solved.placements.items()
    }
    return solved, templates, time.perf_counter() - started


def version() -> tuple[str, str]:
    """What must be equal here and on every worker: the release, and the planner's sources."""
    return metadata.version("coral-serving"), digest_of_sources(Path(planner.__file__).parent)


@dataclass
class Solvers:
    """Where batches are solved: a running Dask scheduler, or this process and then a cluster here.

    `address` names the scheduler; `workers` is the cluster's size, 0 for this process alone;
    `kind` is the solver's name. Starting a cluster, and every table once more in each of its
    workers, costs as much as a small library, so it starts after CLUSTER_AFTER_S of solving here.
    """

    address: str | None = None
    workers: int | None = None
    kind: str = "exact"
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _client: Any = None
    _spent_s: float = 0.0  # in this process

    def __enter__(self) -> Solvers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._client = None

    def run(
        self, problem: PhaseProblem, members: Members, floors: Floats, max_nodes: int
    ) -> Iterator[Batch]:
        """Results of all combinations of one size, batch by batch, as they come."""
        if not len(members):
            return
        packed = _Packed.of(problem, self.kind, max_nodes)
        sizes = _BatchSizes(len(members), FIRST_BATCH[self.kind])
        while self._stays_here() and (rows := sizes.next_rows(workers=1)) is not None:
            batch = Batch(rows, *_solve_packed(packed, members[rows], floors[rows]))
            self._spent_s += batch.seconds
            sizes.measured(len(rows), batch.seconds)
            yield batch
        if sizes.left:
            yield from self._run_on_dask(packed, members, floors, sizes)

    def _stays_here(self) -> bool:
        if self.workers == 0:
            return True
        return not self.address and self._client is None and self._spent_s < CLUSTER_AFTER_S

    def _run_on_dask(
        self, packed: _Packed, members: Members, floors: Floats, sizes: _BatchSizes
    ) -> Iterator[Batch]:
        client = self.connect()
        workers = max(1, len(client.scheduler_info(n_workers=-1)["workers"]))
        rows_of: dict[str, NDArray[np.intp]] = {}
        under_way = distributed.as_completed(raise_errors=False)

        def submit() -> None:
            rows = sizes.next_rows(workers)
            if rows is not None:
                future = client.submit(
                    _solve_packed, packed, members[rows], floors[rows], pure=False
                )
                rows_of[future.key] = rows
                under_way.add(future)

        for _ in range(BATCHES_PER_WORKER * workers):
            submit()
        for future in under_way:
            rows = rows_of.pop(future.key)
            try:
                batch = Batch(rows, *future.result())
            except distributed.CancelledError as error:
                raise SchedulerUnreachableError(
                    "the Dask scheduler stopped answering; what was committed stays: start it "
                    "again and repeat the command"
                ) from error
            except distributed.KilledWorker as error:
                raise WorkersLostError(
                    f"a batch of {len(rows)} combinations lost its worker again and again, most "
                    "likely for want of memory; start fewer workers, or larger ones"
                ) from error
            future.release()
            sizes.measured(len(rows), batch.seconds)
            submit()
            yield batch

    def connect(self) -> Any:
        """The Dask client, started on first use.

        Raises SchedulerUnreachableError or SchedulerMismatchError.
        """
        if self._client is None:
            logging.getLogger("distributed").setLevel(logging.ERROR)
            if self.address:
                self._client = self._stack.enter_context(_connect_to(self.address))
            else:
                cluster = self._stack.enter_context(
                    distributed.LocalCluster(
                        n_workers=self.workers or os.cpu_count() or 1,
                        threads_per_worker=1,
                        dashboard_address="127.0.0.1:0",
                        silence_logs=logging.ERROR,
                    )
                )
                self._client = self._stack.enter_context(distributed.Client(cluster))
        return self._client


def connected_workers(address: str) -> int:
    """How many workers a running scheduler has.

    Raises SchedulerUnreachableError or SchedulerMismatchError.
    """
    logging.getLogger("distributed").setLevel(logging.ERROR)
    with _connect_to(address) as client:
        return len(client.scheduler_info(n_workers=-1)["workers"])


def _connect_to(address: str) -> Any:
    try:
        client = distributed.Client(address, timeout=REACH_SCHEDULER_S)
    except (OSError, TimeoutError, ValueError) as error:
        raise SchedulerUnreachableError(
            f"no Dask scheduler answers at {address}; start one with `dask scheduler`, or leave "
            "--dask out to use this machine"
        ) from error
    try:
        _require_this_coral(client, address)
    except BaseException:
        client.close()
        raise
    return client


def _require_this_coral(client: Any, address: str) -> None:
    here = version()
    remedy = f"install {_describe(here)} there and start the workers again"
    found = client.run(version, on_error="return")
    if not found:
        raise SchedulerMismatchError(
            f"the Dask scheduler at {address} has no workers; start some with "
            f"`dask worker {address}`"
        )
    for worker, theirs in found.items():
        if isinstance(theirs, BaseException):
            raise SchedulerMismatchError(
                f"Dask worker {worker} has no Coral ({theirs}); {remedy}"
            ) from theirs
        if theirs != here:
            raise SchedulerMismatchError(
                f"Dask worker {worker} has {_describe(theirs)}, this is {_describe(here)}; {remedy}"
            )


def _describe(found: tuple[str, str]) -> str:
    return f"Coral {found[0]} (planner {found[1]})"


class _BatchSizes:
    """Cuts a level's rows into batches of BATCH_SECONDS, as fast as the last ones were."""

    def __init__(self, rows: int, first: int) -> None:
        self.rows, self.size = rows, first
        self.taken = 0

    @property
    def left(self) -> int:
        return self.rows - self.taken

    def next_rows(self, workers: int) -> NDArray[np.intp] | None:
        if not self.left:
            return None
        # The last rows are shared out, so that no worker is left with a long batch alone.
        size = max(1, min(self.size, -(-self.left // workers)))
        rows = np.arange(self.taken, min(self.taken + size, self.rows))
        self.taken += len(rows)
        return rows

    def measured(self, rows: int, seconds: float) -> None:
        wanted = int(rows * BATCH_SECONDS / max(seconds, 1e-3))
        self.size = max(1, min(wanted, 4 * self.size, LARGEST_BATCH))


@dataclass(frozen=True)
class _Packed:
    """A phase problem on its way to a worker."""

    digest: str
    data: bytes
    kind: str
    max_nodes: int

    @classmethod
    def of(cls, problem: PhaseProblem, kind: str, max_nodes: int) -> _Packed:
        data = pickle.dumps(problem)
        digest = hashlib.sha256(data).hexdigest()
        return cls(digest, data, kind, max_nodes)


_latest: tuple[tuple[str, str, int], PhaseProblem, PlacementSolver] | None = None
_one_at_a_time = threading.Lock()  # a solver has one work space; workers may have many threads


def _solve_packed(
    packed: _Packed, members: Members, floors: Floats
) -> tuple[Solved, dict[int, Template], float]:
    """On a worker: batches of one phase share its solver with all its tables."""
    global _latest
    key = (packed.digest, packed.kind, packed.max_nodes)
    with _one_at_a_time:
        if _latest is None or _latest[0] != key:
            _latest = None  # let the old tables go first
            problem: PhaseProblem = pickle.loads(packed.data)
            _latest = (key, problem, solver_for(problem, packed.kind, packed.max_nodes))
        return solve_batch(_latest[2], _latest[1], members, floors)

"""Library builds on Dask: any scheduler, lost workers, workers of another Coral."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import distributed
import pytest

from catalog.store import Catalog
from planner.types import Phase
from tasks import solving
from tasks.allocation import read_library
from tasks.inputs import Inputs, load_inputs
from tasks.library import build_phase
from tasks.scenario_file import read_scenario
from tasks.solving import SchedulerMismatchError, SchedulerUnreachableError, Solvers


def inputs_in(catalog: Catalog) -> Inputs:
    return load_inputs(catalog, read_scenario("tiny"))


def build(catalog: Catalog, solvers: Solvers) -> Inputs:
    inputs = inputs_in(catalog)
    with solvers:
        for phase in inputs.phases:
            build_phase(catalog, phase, solvers)
    return inputs


@pytest.fixture
def here(tmp_path: Path) -> tuple[Catalog, Inputs]:
    """The library of the tiny scenario, solved in this process."""
    catalog = Catalog(tmp_path / "here")
    return catalog, build(catalog, Solvers(workers=0))


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """A scheduler of its own with two workers, as a user would start it."""
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=2, dashboard_address="127.0.0.1:0"
    ) as cluster:
        yield cluster.scheduler_address


def test_a_named_scheduler_and_this_process_find_the_same(
    here: tuple[Catalog, Inputs], scheduler: str, tmp_path: Path
) -> None:
    there = Catalog(tmp_path / "there")
    inputs = build(there, Solvers(address=scheduler))
    assert read_library(there, inputs) == read_library(*here)


def test_a_killed_worker_costs_only_its_batch(
    here: tuple[Catalog, Inputs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solving, "FIRST_BATCH", {"exact": 1})
    monkeypatch.setattr(solving, "BATCH_SECONDS", 0.0)
    monkeypatch.setattr(solving, "CLUSTER_AFTER_S", 0.0)
    there = Catalog(tmp_path / "there")
    inputs = inputs_in(there)
    decode = next(p for p in inputs.phases if p.problem.phase is Phase.DECODE)
    killed = []

    class KillingSolvers(Solvers):
        def run(self, problem, members, floors, max_nodes):
            for batch in super().run(problem, members, floors, max_nodes):
                yield batch
                if not killed and problem.phase is Phase.DECODE and len(members) > 4:
                    killed.append(next(iter(self.connect().run(os.getpid).values())))
                    os.kill(killed[0], signal.SIGKILL)

    with KillingSolvers(workers=2) as solvers:
        for phase in inputs.phases:
            library = build_phase(there, phase, solvers)
            if phase is decode:
                assert library.solved == library.combinations
    assert killed
    assert read_library(there, inputs) == read_library(*here)


def test_an_unreachable_scheduler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "REACH_SCHEDULER_S", 1.0)
    with (
        Solvers(address="tcp://127.0.0.1:1") as solvers,
        pytest.raises(SchedulerUnreachableError, match="no Dask scheduler answers at tcp://"),
    ):
        solvers.connect()


def test_workers_of_another_coral_are_refused(
    scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert solving.connected_workers(scheduler) == 2
    release, here = solving.version()[0], os.getpid()

    def version() -> tuple[str, str]:
        return release, "here" if os.getpid() == here else "there"

    monkeypatch.setattr(solving, "version", version)
    with pytest.raises(
        SchedulerMismatchError, match=rf"has Coral {release} \(planner there\), this is .*here\)"
    ):
        solving.connected_workers(scheduler)


def test_workers_without_coral_are_refused(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def version():\n    return ('1', 1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here

    monkeypatch.setattr(solving, "version", only_here.version)
    with pytest.raises(
        SchedulerMismatchError, match=r"has no Coral \(.*No module named 'only_here"
    ):
        solving.connected_workers(scheduler)


def test_a_scheduler_without_workers_is_named() -> None:
    with (
        distributed.LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as cluster,
        pytest.raises(SchedulerMismatchError, match="has no workers; start some with `dask worker"),
    ):
        solving.connected_workers(cluster.scheduler_address)

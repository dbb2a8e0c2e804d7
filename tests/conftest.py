"""Shared inputs: the seeded catalog, and small synthetic problems."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")

from catalog import reads
from catalog.seed import import_seed
from catalog.store import Catalog
from planner.known import Known
from planner.perf.model import PerformanceModel
from tasks.inputs import Inputs, load_inputs, performance_model, read_known
from tasks.library import build_phase, share_templates
from tasks.scenario_file import read_scenario
from tasks.solving import Solvers
from tests.support.aws_server import AwsServer
from tests.support.library import build_library
from tests.support.planned import planned_catalog


def pytest_unconfigure() -> None:
    """Prefect's server in a test process says at exit that it ends, to a stream that is closed."""
    logging.raiseExceptions = False


@pytest.fixture(autouse=True)
def _isolated_prefect(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> None:
    """No test touches the user's Prefect or Coral home."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path_factory.getbasetemp() / "prefect"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("CORAL_HOME", str(tmp_path_factory.mktemp("coral-home")))


@pytest.fixture(scope="session")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """A catalog with the shipped data and nothing else."""
    catalog = Catalog(tmp_path_factory.mktemp("seeded"))
    with catalog.write() as connection:
        import_seed(connection)
    return catalog


@pytest.fixture(scope="session")
def performance(seeded: Catalog) -> PerformanceModel:
    with seeded.read() as connection:
        return performance_model(reads.read_performance(connection))


@pytest.fixture(scope="session")
def known(seeded: Catalog) -> Known:
    with seeded.read() as connection:
        return read_known(connection)


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> tuple[Catalog, Inputs]:
    """The core scenario with its library of at most two nodes, built once."""
    catalog = Catalog(tmp_path_factory.mktemp("core"))
    spec = read_scenario("core")
    placement = spec.placement.model_copy(update={"max_nodes": 2})
    allocation = spec.allocation.model_copy(update={"deadline_s": 5.0})
    inputs = load_inputs(
        catalog, spec.model_copy(update={"placement": placement, "allocation": allocation})
    )
    with Solvers(workers=2) as solvers:
        for phase in inputs.phases:
            build_phase(catalog, phase, solvers)
    share_templates(catalog, inputs.phases)
    return catalog, inputs


@pytest.fixture(scope="session")
def tiny_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with the templates of the tiny scenario, built once."""
    return build_library(tmp_path_factory.mktemp("tiny"), read_scenario("tiny"))


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """Tiny's library, a plan, and a fleet that had one node over midnight."""
    return planned_catalog(tmp_path_factory.mktemp("planned"))


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def aws() -> Iterator[AwsServer]:
    """AWS on this machine with three regions on; clients of this process talk to it alone."""
    regions = {"us-east-1", "us-west-2", "eu-central-1"}
    with AwsServer(enabled=regions) as server, server.environment():
        yield server

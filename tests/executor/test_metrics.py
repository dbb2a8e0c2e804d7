"""What the controller tells Prometheus, the dashboard made of it, and logs with ids."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from executor.gateway.demand import DemandBook
from executor.gateway.measure import Measures
from executor.lease_store import SqliteLeaseStore
from executor.logs import formatter
from planner.leases import Lease, LeaseState
from planner.types import Market
from tests.support.ports import free_port

CORAL = Path(sys.executable).with_name("coral")
NOW = datetime(2026, 3, 1, tzinfo=UTC)


def lease(name: str, price: float, state: LeaseState) -> Lease:
    return Lease(
        name, "aws:us-east-1", "g6.xlarge", "L4 x1", Market.SPOT, price, state, NOW, scenario="s"
    )


@pytest.fixture(scope="module")
def exposition(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a real controller on a home with three leases, one of which is over."""
    home = tmp_path_factory.mktemp("controlled")
    store = SqliteLeaseStore(home / "leases.sqlite")
    store.save_all(
        [
            lease("a", 1.5, LeaseState.READY),
            lease("b", 2.0, LeaseState.LAUNCHING),
            lease("c", 9.0, LeaseState.TERMINATED),
        ],
        NOW,
    )
    address = f"127.0.0.1:{free_port()}"
    command = [CORAL, "controller", "--home", home, "--metrics", address]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "controller at" in process.stderr.readline()
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                text: str = answer.read().decode()
            taken = subprocess.run(
                [CORAL, "controller", "--home", home / "other", "--metrics", address],
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert taken.returncode == 2
            assert "free host:port" in taken.stderr
        finally:
            process.terminate()
    return text


def test_leases_and_their_cost(exposition: str) -> None:
    found = {
        sample.name: sample
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }
    assert found["coral_leases_usd_per_hour"].value == pytest.approx(3.5)
    states = re.findall(r'coral_leases{.*state="(\w+)"} 1\.0', exposition)
    assert sorted(states) == ["launching", "ready"]
    assert found["coral_controller_restarts"].value == 0


def test_every_metric_of_the_dashboard_is_one_of_ours(
    exposition: str, repository: Path, tmp_path: Path
) -> None:
    text = (repository / "docs" / "grafana.json").read_text()
    board = json.loads(text)
    ends = [panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in board["panels"]]
    assert max(ends) <= 24
    gateway = Measures(DemandBook(tmp_path)).exposition().decode()
    ours = set(re.findall(r"# TYPE (coral_\w+)", exposition + gateway))
    ours |= {f"{name}_bucket" for name in ours}
    asked = set(re.findall(r"(coral_\w+)[\[{) ]?", " ".join(re.findall(r'"expr": "(.*)"', text))))
    assert len(asked) >= 10
    assert asked - ours == set()


def test_a_log_line_has_its_ids() -> None:
    record = logging.makeLogRecord(
        {"name": "coral.rounds", "levelname": "INFO", "levelno": 20, "msg": "lease %s ready",
         "args": ("a",), "lease_id": "a", "run_id": "r", "secret": "no"}
    )  # fmt: skip
    line = json.loads(formatter(json=True).format(record))
    assert line.pop("time").endswith("Z")
    assert line == {
        "event": "lease a ready", "level": "info", "logger": "coral.rounds", "lease_id": "a",
        "run_id": "r",
    }  # fmt: skip
    assert formatter(json=False).format(record).endswith("INFO coral.rounds: lease a ready")

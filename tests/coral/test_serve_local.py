"""`coral serve-local` as a user runs it, with a small server in vLLM's place."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import psutil
import pytest

from catalog.store import Catalog
from executor.home import HomeFiles
from executor.routes import read_routes
from tasks.local_run import measurements_file
from tasks.observed import load_inbox
from tests.measurements import measurements
from tests.tasks.test_local import CONFIG, vllm_python

CORAL = [sys.executable, "-m", "coral"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the model and its measurement, so that neither is made."""
    found = tmp_path / "home"
    model, profile = found / "models" / "tiny", measurements_file(found, "CPU", CONFIG)
    model.mkdir(parents=True)
    profile.parent.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    profile.write_text(json.dumps(measurements(config=CONFIG)))
    return found


@pytest.fixture
def scenario(tmp_path: Path, repository: Path) -> Path:
    """The shipped one, on core 0 alone and with another interpreter."""
    text = (repository / "examples" / "local.yaml").read_text()
    text = text.replace('[["1"]]', '[["0"]]')
    text = text.replace("      dtype:", f"      python: {vllm_python(tmp_path)}\n      dtype:")
    path = tmp_path / "here.yaml"
    path.write_text(text)
    return path


def command(home: Path, scenario: Path, *options: str) -> list[str]:
    return [*CORAL, "serve-local", "-s", str(scenario), "--home", str(home), *options]


def processes(home: Path) -> list[psutil.Process]:
    """All that were started for a home."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if process.pid != os.getpid() and any(str(home) in word for word in words):
            found.append(process)
    return found


def test_it_plans_serves_measures_and_ends(home: Path, scenario: Path) -> None:
    done = subprocess.run(
        command(home, scenario, "--requests", "12", "--json"),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["replicas"], found["round"]["launched"]) == (1, 2)
    (served,) = found["served"]
    seen, planned = served["measured"], served["planned"]
    assert (seen["requests"], seen["failed"]) == (12, 0)
    assert seen["output_tokens_per_s"] > 0
    assert 0.0 < seen["tpot_mean_ms"] <= seen["tpot_p95_ms"]
    assert served["concurrency"] == planned["in_flight"] > 1
    assert processes(home) == []
    # The gateway has left what the replica did, under the template that was planned.
    catalog = Catalog(home)
    (template,) = catalog.query(
        "SELECT DISTINCT template_id FROM allocation_item JOIN allocation USING (allocation_id) "
        "WHERE planner = 'coral'"
    )[1]
    files = list(HomeFiles(home).inbox.glob("replicas-*.parquet"))
    rows = pl.concat([pl.read_parquet(file) for file in files])
    assert set(rows["template"]) == set(template) and rows["replica"].n_unique() == 1
    assert rows["measured"].sum() >= 12 and rows["decode_tokens"].sum() > 12
    assert load_inbox(catalog, datetime.now(UTC)).broken == ()
    leases = subprocess.run(
        [*CORAL, "fleet", "list", "--home", str(home), "--json"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert json.loads(leases.stdout)["rows"] == []


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_is_left_of_an_interrupted_run(
    home: Path, scenario: Path, how: signal.Signals, code: int
) -> None:
    running = subprocess.Popen(
        command(home, scenario, "--requests", "100000"),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    ends = time.monotonic() + 120
    routes = HomeFiles(home).routes
    while time.monotonic() < ends and not read_routes(routes).routes:
        assert running.poll() is None
        time.sleep(0.2)
    assert len(processes(home)) >= 6  # the command, controller, gateway, agents, engines
    children = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(how)
    assert running.wait(30) == code
    ends = time.monotonic() + 60  # agents end when their lease does
    while time.monotonic() < ends and processes(home):
        time.sleep(0.5)
    assert processes(home) == []
    if how is not signal.SIGKILL:  # Prefect's temporary server outlives that
        assert not psutil.wait_procs(children, 10)[1]
    for child in children:
        if child.is_running():
            child.kill()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('cores: [["0"]]', 'cores: [["4000"]]', "names core 4000"),
        ("      random: {layers: 8, hidden: 512}", "      block_size: 32", "no model in"),
        ("/python-0.32.0", "/python", "where vLLM should be; set it up with `make setup-vllm`"),
        ("kind: local", "kind: cloud", "fleet.kind"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    tmp_path: Path, scenario: Path, old: str, new: str, message: str
) -> None:
    text = scenario.read_text()
    assert old in text
    scenario.write_text(text.replace(old, new))
    done = subprocess.run(
        command(tmp_path / "none", scenario),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_scenario_without_a_local_fleet_and_a_taken_port_are_named(
    home: Path, scenario: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, message in (
            (["serve-local", "-s", "core"], "has no local fleet"),
            (["serve-local", "-s", str(scenario), "--port", port], f"on 127.0.0.1:{port} (Address"),
            (["gateway", "--port", port], f"cannot listen on 127.0.0.1:{port}"),
        ):
            done = subprocess.run(
                [*CORAL, *arguments, "--home", str(home)],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert done.returncode == 2, done.stderr
            assert message in done.stderr

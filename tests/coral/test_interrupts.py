"""Commands that are interrupted or ended from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

import planner


def long_build(home: Path) -> list[str]:
    """A command that builds for half a minute, on Dask workers from the first batch on."""
    scenario = home / "four-nodes.yaml"
    text = (Path(planner.__file__).parents[1] / "examples" / "extended.yaml").read_text()
    scenario.write_text(re.sub(r"max_nodes: 6", "max_nodes: 4", text))
    start = (
        "from tasks import solving; solving.CLUSTER_AFTER_S = 0.0; "
        "from coral.cli import main; main()"
    )
    arguments = ["library", "build", "--scenario", str(scenario), "--home", str(home)]
    return [sys.executable, "-c", start, *arguments]


def test_ctrl_c_exits_130_at_once_and_keeps_what_was_solved(tmp_path: Path) -> None:
    command = long_build(tmp_path)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and stored(tmp_path) < 5:
            time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert process.returncode == 130, (out, err)
    assert "interrupted; what was committed is kept" in err
    assert "Traceback" not in err
    assert stored(tmp_path) >= 5
    assert (tmp_path / "coral-snapshot.duckdb").exists()  # analysts see it already


def test_a_termination_takes_every_child_along(tmp_path: Path) -> None:
    command = long_build(tmp_path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        started = psutil.Process(process.pid)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and stored(tmp_path) < 1:
            time.sleep(0.5)
        children = started.children(recursive=True)
        process.terminate()
        process.wait(timeout=10)
    assert process.returncode == 143
    assert len(children) >= 3  # Prefect's server and two Dask workers at least
    assert psutil.wait_procs(children, timeout=10)[1] == []


def stored(home: Path) -> int:
    """Combinations that another process has committed so far."""
    from catalog.store import Catalog

    if not (home / "coral.duckdb").exists():
        return 0
    with Catalog(home).read() as connection:
        return int(connection.execute("SELECT count(*) FROM solution").fetchall()[0][0])

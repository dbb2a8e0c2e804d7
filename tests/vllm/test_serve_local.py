"""`make run-vllm`, but for the set-up: the shipped local scenario, measured, planned and served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def coral(*arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "coral", *arguments, "--json"],
        capture_output=True, text=True, timeout=850, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_from_an_empty_home_to_tokens(tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    found = coral("serve-local", "--requests", "32", *home)
    (served,) = found["served"]
    assert (found["replicas"], found["round"]["launched"]) == (1, 2)
    assert (served["measured"]["requests"], served["measured"]["failed"]) == (32, 0)
    assert served["measured"]["output_tokens_per_s"] > 0
    (profile,) = (tmp_path / "profiles" / "CPU").glob("*.json")
    assert json.loads(profile.read_text())["machine"]["vllm"].startswith("0.32.")
    rows = "SELECT phase, count(*) FROM layer_profile WHERE gpu_profile = 'CPU' GROUP BY ALL"
    counts = dict(coral("sql", f"{rows} ORDER BY ALL", *home)["rows"])
    assert counts["decode"] >= 6 and counts["prefill"] >= 8 and counts["mixed"] >= 1
    assert coral("fleet", "list", *home)["rows"] == []
    assert "Application startup complete" in _log_of_the_first_stage(tmp_path)


def _log_of_the_first_stage(home: Path) -> str:
    (log,) = (home / "agents").glob("*/*-stage0-group0.log")
    return log.read_text(errors="replace")

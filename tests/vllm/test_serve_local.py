"""`make run-vllm`, but for the set-up: the shipped local scenario, measured, planned and served."""

from __future__ import annotations

import json
from pathlib import Path

from .local import coral, serve_local

EXAMPLE = Path(__file__).parents[2] / "examples" / "local.yaml"


def is_served(home: Path, found: dict) -> None:
    """By a pipeline over both nodes: all requests; and nothing is left."""
    (served,) = found["served"]
    assert (found["replicas"], found["round"]["launched"]) == (1, 2)
    assert (served["measured"]["requests"], served["measured"]["failed"]) == (32, 0)
    assert served["measured"]["output_tokens_per_s"] > 0
    assert coral(home, "fleet", "list")["rows"] == []


def test_from_an_empty_home_to_tokens(local_run: tuple[Path, dict]) -> None:
    home, found = local_run
    is_served(home, found)
    (profile,) = (home / "profiles" / "CPU").glob("*.json")
    assert json.loads(profile.read_text())["machine"]["vllm"].startswith("0.32.")
    rows = "SELECT phase, count(*) FROM layer_profile WHERE gpu_profile = 'CPU' GROUP BY ALL"
    counts = dict(coral(home, "sql", f"{rows} ORDER BY ALL")["rows"])
    assert counts["decode"] >= 6 and counts["prefill"] >= 8 and counts["mixed"] >= 1
    (log,) = (home / "agents").glob("*/*-stage0-group0.log")
    assert "Application startup complete" in log.read_text(errors="replace")


def test_with_corals_pipelines(local_run: tuple[Path, dict], tmp_path: Path) -> None:
    """The same with one key changed: a head, and a worker of each stage on the plan's nodes."""
    home, _ = local_run
    scenario, text = tmp_path / "pipelines.yaml", EXAMPLE.read_text()
    assert "engine: vllm" in text
    scenario.write_text(text.replace("engine: vllm", "engine: coral"))
    is_served(home, serve_local(home, "--scenario", str(scenario)))
    agents = home / "agents"
    (head,) = agents.glob("*/*-pipe0-head.log")
    assert "Application startup complete" in head.read_text(errors="replace")
    workers = sorted(agents.glob("*/*-pipe0-stage?-node0.log"), key=lambda log: log.name)
    assert len(workers) == 2 and workers[0].parent == head.parent != workers[1].parent

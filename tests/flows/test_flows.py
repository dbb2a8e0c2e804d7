"""Each flow once, as Prefect runs it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.testing.utilities import prefect_test_harness

from flows.allocate import allocate
from flows.build_library import build_library
from flows.operate import operate
from flows.quickstart import quickstart
from planner.errors import NoTemplateError, UnknownNameError
from tasks import progress


@pytest.fixture(scope="module")
def harness():
    with prefect_test_harness(server_startup_timeout=120):
        yield


def test_the_main_path_and_its_parts(harness, tmp_path: Path) -> None:
    home = str(tmp_path)
    with pytest.raises(NoTemplateError, match="run `coral library build` first"):
        allocate("tiny", home)
    seen: list[tuple[str, int, int]] = []
    with progress.watched_by(lambda *report: seen.append(report)):
        library = build_library("tiny", home, workers=0)
    assert library.templates > 0
    assert seen[-1][1] == seen[-1][2]  # progress reached its total
    result = quickstart("tiny", home, workers=0)
    assert all(phase.solved == 0 for phase in result.library.phases)
    assert result.allocation.decision.coral.served_share == 1.0
    assert Path(result.allocation.database).exists()
    with get_client(sync_client=True) as client:
        keys = {artifact.key for artifact in client.read_artifacts()}
    assert {"coral-tiny-plan", "coral-tiny-cost", "coral-tiny-report"} <= keys
    moved = operate("tiny", home)
    assert moved.applied.launched == moved.nodes > 0
    old = tmp_path / "reports" / f"{'0' * 32}.html"
    old.write_text("of a plan")
    two_days_ago = time.time() - 2 * 86400
    os.utime(old, (two_days_ago, two_days_ago))
    assert operate("tiny", home, draft=True, keep_reports_days=1.0) and old.exists()
    assert operate("tiny", home, keep_reports_days=1.0).why == "nothing changed"
    assert not old.exists()
    assert Path(result.allocation.decision.report).exists()


def test_errors_pass_through_a_flow_unchanged(harness, tmp_path: Path) -> None:
    scenario = tmp_path / "s.yaml"
    text = Path("examples/tiny.yaml").read_text().replace("L40S x1", "L40X x1")
    scenario.write_text(text)
    with pytest.raises(UnknownNameError, match="did you mean 'L40S'"):
        build_library(str(scenario), str(tmp_path))

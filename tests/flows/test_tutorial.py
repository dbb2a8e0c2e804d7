"""The tutorial's commands, run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from catalog.store import Catalog


@pytest.mark.timeout(600)
def test_the_tutorial(repository: Path, tmp_path: Path) -> None:
    text = (repository / "docs" / "tutorial.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", "\n".join(blocks)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    _, rows = Catalog(tmp_path / "home").query(
        "SELECT cost_usd_per_hour, served_share FROM allocation_history "
        "WHERE planner = 'coral' ORDER BY created_at"
    )
    assert [(round(cost, 2), served) for cost, served in rows] == [(38.12, 1.0), (20.0, 1.0)]
    assert all(f"${cost:.2f}" in text for cost, _ in rows)
    assert "Without it the best plan found costs $38.12/h" in done.stdout

"""The profile flow once, with a profiler that only writes its file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flows.profile_gpu import profile_gpu
from planner.shapes import ModelConfigError
from tasks.profile_catalog import read_table
from tests.measurements import CONFIG, measurements


def test_a_measured_model_is_in_the_catalog_and_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "fake.py"
    text = json.dumps(measurements())
    script.write_text(f"import sys\nopen(sys.argv[2], 'w').write({text!r})\n")
    monkeypatch.setattr("tasks.profile_run.START", script)
    monkeypatch.setattr("tasks.profile_run.require_torch", lambda _: Path(sys.executable))
    model, home = tmp_path / "small", tmp_path / "home"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    found = profile_gpu(str(model), "CPU", options={"minutes": 1.0}, home=str(home))
    (model / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["X"]}))
    with pytest.raises(ModelConfigError, match="X are unknown"):
        profile_gpu(str(model), "CPU", home=str(home))
    assert [file.name for file in found.files] == ["small-CPU.parquet"]
    assert found.files[0].exists() and found.profiles[0].rows == 15
    assert len(read_table(str(home), "small", "CPU", 1).rows) == 15

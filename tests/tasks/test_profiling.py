"""A measurement of this machine taken into the catalog."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from catalog.seed import import_seed
from catalog.store import Catalog
from planner.types import Provenance
from tasks.inputs import load_inputs
from tasks.profiling import ProbeError, ProbeFile, import_probe, probe
from tasks.scenario_file import read_scenario
from tests.tasks.test_local import CONFIG, PROBE


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_second_measurement_takes_the_firsts_place(tmp_path: Path, model: Path) -> None:
    catalog = Catalog(tmp_path / "home")
    with catalog.write() as connection:
        import_seed(connection)
    for _ in range(2):
        probed = ProbeFile.model_validate(PROBE)
        import_probe(catalog, probed, "coral/tiny", model, "float32", "CPU")
    with catalog.read() as connection:
        rows = connection.execute(
            "SELECT count(*), any_value(source) FROM layer_profile WHERE model = 'coral/tiny'"
        ).fetchall()
        points = connection.execute("SELECT count(*) FROM engine_point WHERE gpu_profile = 'CPU'")
        assert rows[0][0] == 6 + 3
        assert points.fetchall() == [(6,)]
        assert "a CPU, cores 0, vLLM 0.32.0" in rows[0][1]
    inputs = load_inputs(catalog, read_scenario("local"))
    assert inputs.performance.engine_overhead_ms["0.0"] == pytest.approx(0.8, abs=1e-6)
    (workload,) = inputs.scenario.workloads
    node = inputs.scenario.node_classes[0]
    found = inputs.performance.provenance(workload.model, workload.dtype, node, 1)
    assert found is Provenance.MEASURED


def test_a_measurement_that_fails_names_its_log(tmp_path: Path, model: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no memory; exit 3\n")
    python.chmod(0o755)
    with pytest.raises(ProbeError, match=r"measuring .* failed; .*\.log says why"):
        probe(python, model, ["0"], tmp_path / "out")
    (log,) = (tmp_path / "out").glob("*.log")
    assert log.read_text() == "no memory\n"


def test_a_file_that_is_no_measurement_is_named(tmp_path: Path, model: Path) -> None:
    digest = hashlib.sha256((model / "config.json").read_bytes()).hexdigest()[:12]
    (tmp_path / f"{digest}.json").write_text("{}")
    with pytest.raises(ProbeError, match="remove it, and it is made anew"):
        probe(tmp_path / "none", model, ["0"], tmp_path)

"""Models of a local fleet measured before it serves, with what a profiler wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from catalog.seed import import_seed
from catalog.store import Catalog
from planner.scenario import ScenarioSpec
from planner.types import Provenance
from tasks.inputs import load_inputs
from tasks.local_run import measurements_file, prepare
from tasks.profile_file import ProfileFileError
from tasks.profile_run import ProfilerError
from tasks.scenario_file import read_scenario
from tests.measurements import OVERHEAD_MS
from tests.tasks.test_local import CONFIG, take_measurements, with_memory
from tests.tasks.test_local import with_engine as with_engine_of


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    found = Catalog(tmp_path / "home")
    with found.write() as connection:
        import_seed(connection)
    write_model(found, CONFIG)
    return found


def write_model(catalog: Catalog, config: dict[str, object]) -> None:
    folder = catalog.home / "models" / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def spec(tmp_path: Path) -> ScenarioSpec:
    """On core 0 alone, with an interpreter that cannot measure."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$1 $2" in\n*find_spec*) echo True;;\n-c*) echo 0.32.0;;\n'
        "*) echo no memory >&2; exit 1;;\nesac\n"
    )
    python.chmod(0o755)
    engine = {"python": str(python)}
    return with_memory(with_engine_of(read_scenario("local"), **engine), 0.07, 0.045)


def test_what_was_measured_is_not_measured_again(catalog: Catalog, spec: ScenarioSpec) -> None:
    take_measurements(catalog)
    for _ in range(2):
        prepare(catalog, spec)
    with catalog.read() as connection:
        rows = connection.execute(
            "SELECT count(*), any_value(source) FROM layer_profile WHERE model = 'coral/tiny'"
        ).fetchall()
        points = connection.execute("SELECT count(*) FROM engine_point WHERE gpu_profile = 'CPU'")
        assert rows[0][0] == 15
        assert points.fetchall() == [(1,)]
        assert "Some Processor" in rows[0][1]
    inputs = load_inputs(catalog, spec)
    assert inputs.performance.engine_overhead_ms["0.0"] == pytest.approx(OVERHEAD_MS, abs=0.01)
    (workload,) = inputs.scenario.workloads
    node = inputs.scenario.node_classes[0]
    found = inputs.performance.provenance(workload.model, workload.dtype, node, 1)
    assert found is Provenance.MEASURED
    assert workload.model.layers == CONFIG["num_hidden_layers"]


def test_another_model_in_the_folder_takes_the_firsts_place(
    catalog: Catalog, spec: ScenarioSpec
) -> None:
    first = take_measurements(catalog)
    prepare(catalog, spec)
    deeper = {**CONFIG, "num_hidden_layers": 12}
    write_model(catalog, deeper)
    found = json.loads(first.read_text())
    second = measurements_file(catalog.home, "CPU", deeper)
    second.write_text(json.dumps({**found, "config": deeper}))
    assert second != first
    prepare(catalog, spec)
    (workload,) = load_inputs(catalog, spec).scenario.workloads
    assert workload.model.layers == 12


def test_a_measurement_that_fails_is_said(catalog: Catalog, spec: ScenarioSpec) -> None:
    with pytest.raises(ProfilerError, match="measuring coral/tiny failed: no memory"):
        prepare(catalog, spec)
    assert not measurements_file(catalog.home, "CPU", CONFIG).exists()


def test_a_file_that_is_no_measurement_is_named(catalog: Catalog, spec: ScenarioSpec) -> None:
    path = take_measurements(catalog)
    path.write_text("{}")
    with pytest.raises(ProfileFileError, match=f"{path.name} holds no measurements"):
        prepare(catalog, spec)

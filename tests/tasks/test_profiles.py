"""Profiles: from raw points to tables in the catalog, files, plots, and the library after them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import distributed
import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from catalog import reads
from catalog.store import Catalog
from planner.errors import InputError, MissingProfileError, UnknownNameError
from planner.hop import hop_of
from planner.known import Known
from planner.perf.model import PerformanceModel
from planner.shapes import ModelConfigError
from planner.types import NodeClass
from tasks.inputs import load_inputs, performance_model
from tasks.library import build_phase
from tasks.profile_catalog import calibrate, import_file, known_of, list_tables, read_table
from tasks.profile_file import ProfileFileError, read_measurements
from tasks.profile_plot import draw_table
from tasks.profile_run import (
    ProfileRequest,
    ProfilerError,
    ProfilerRefusedError,
    check_request,
    one_worker_per_host,
    profile_on_workers,
    read_model,
    run_profiler,
)
from tasks.profile_tables import (
    NEEDED,
    gpu_named,
    import_profile,
    profile_of,
    read_profile,
    write_profile_file,
)
from tasks.scenario_file import read_scenario
from tasks.solving import SchedulerMismatchError, SchedulerUnreachableError, Solvers
from tests.measurements import CONFIG, OVERHEAD_MS, REDUCE_MS, layer_ms, measurements

NOW = datetime(2026, 11, 30, tzinfo=UTC)


def file_of(folder: Path, found: dict) -> Path:
    path = folder / "small.json"
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    found = Catalog(tmp_path / "home")
    known_of(found)
    return found


def home_of(catalog: Catalog) -> str:
    return str(catalog.home)


def performance_in(catalog: Catalog) -> PerformanceModel:
    with catalog.read() as connection:
        return performance_model(reads.read_performance(connection))


def test_raw_points_become_tables_that_the_planner_uses(catalog: Catalog, tmp_path: Path) -> None:
    path = file_of(tmp_path, measurements())
    found = import_file(home_of(catalog), path, "CPU", None, NOW)
    assert (found.rows, found.tables[1].lifted, found.tables[1].outliers) == (15, (), ())
    assert "Some Processor" in found.source and "vLLM 0.32.0" in found.source
    known, performance = known_of(catalog), performance_in(catalog)
    model, gpu = known.models["small"], known.gpus["CPU"]
    assert (model.dtype, gpu.half_tflops, gpu.memory_gib) == ("float32", 0.1, 16.0)
    node = NodeClass("CPU x1", gpu, 1, *_link())
    step = performance.decode_step(model, "float32", node, 1, np.array([4.0]), np.array([128.0]))
    assert step.layer_ms[0] == pytest.approx(layer_ms("decode", 4, 4, 128), rel=0.02)
    assert step.head_ms[0] == pytest.approx(0.1)
    assert performance.overhead_ms(gpu) == pytest.approx(OVERHEAD_MS, rel=0.03)
    view = read_table(home_of(catalog), "small", "CPU", 1)
    assert abs(view.engine[0].tpot_error) < 0.01
    with catalog.read() as connection:
        rows = connection.execute("SELECT provenance->>'torch', rows FROM profile").fetchall()
        hops = connection.execute("SELECT message_bytes, hop_ms FROM hop").fetchall()
    assert rows == [("2.13.0", 15)] and len(hops) == 2


def _link() -> tuple:
    from planner.types import Link

    return Link.PCIE, 1.0, 1.0


def test_communication_is_taken_off_and_added_again(catalog: Catalog, tmp_path: Path) -> None:
    import_file(home_of(catalog), file_of(tmp_path, measurements(tp=2)), "CPU", None, NOW)
    known, performance = known_of(catalog), performance_in(catalog)
    model = known.models["small"]
    node = NodeClass("CPU x2", known.gpus["CPU"], 2, *_link())
    rows = performance.rows["small", "float32", "CPU", 2]
    one = next(row for row in rows if (row.phase, row.batch, row.context) == ("decode", 4, 128))
    assert one.linear_ms + one.attention_ms == pytest.approx(layer_ms("decode", 4, 4, 128))
    step = performance.decode_step(model, "float32", node, 2, np.array([4.0]), np.array([128.0]))
    whole = layer_ms("decode", 4, 4, 128) + 2 * REDUCE_MS
    assert step.layer_ms[0] == pytest.approx(whole, rel=0.02)


def test_a_profile_file_gives_back_what_was_written(catalog: Catalog, tmp_path: Path) -> None:
    known = known_of(catalog)
    raw = read_measurements(file_of(tmp_path, measurements()))
    profile = profile_of(raw, "small", gpu_named("CPU", known, raw))
    write_profile_file(profile, tmp_path / "a.parquet")
    again = read_profile(tmp_path / "a.parquet", known, None, None)
    assert again.tables == profile.tables
    assert (again.gpu, again.model, again.engine) == (profile.gpu, profile.model, profile.engine)
    assert again.all_reduce == profile.all_reduce and again.hop == profile.hop
    beside = json.loads(pq.read_schema(tmp_path / "a.parquet").metadata[b"coral"])
    seen = beside["provenance"]
    assert {"driver", "torch", "vllm", "measured_at", "clocks_mhz", "kernels"} <= set(seen)


def seed_csv(catalog: Catalog, path: Path, factor: float = 1.0) -> pl.DataFrame:
    """The shipped table of Qwen3-14B on an L40S as a CSV, all times scaled."""
    with catalog.read() as connection:
        frame = connection.sql(
            "SELECT model, gpu_profile AS gpu, tensor_parallel_size AS tp, dtype, phase, batch, "
            "tokens, context, linear_ms, attention_ms AS attn_ms, head_ms FROM layer_profile "
            "WHERE model = 'Qwen/Qwen3-14B' AND dtype = 'bf16' AND gpu_profile = 'L40S-48GB' "
            "AND tensor_parallel_size = 1 ORDER BY ALL"
        ).pl()
    frame = frame.with_columns(pl.col("linear_ms", "attn_ms") * factor)
    frame.write_csv(path)
    return frame


def test_a_csv_with_the_documented_columns_is_taken(catalog: Catalog, tmp_path: Path) -> None:
    frame = seed_csv(catalog, tmp_path / "a.csv", 2.0)
    assert set(frame.columns) == set(NEEDED)
    before = performance_in(catalog).rows["Qwen/Qwen3-14B", "bf16", "L40S-48GB", 1]
    import_file(home_of(catalog), tmp_path / "a.csv", None, None, NOW)
    after = performance_in(catalog).rows["Qwen/Qwen3-14B", "bf16", "L40S-48GB", 1]
    assert len(after) == len(before) == len(frame)
    assert sum(r.linear_ms for r in after) == pytest.approx(
        2 * sum(r.linear_ms for r in before), rel=0.01
    )
    assert after[0].source == "imported from a.csv"
    columns, rows = list_tables(home_of(catalog))
    assert rows[0][:4] == ("Qwen/Qwen3-14B", "bf16", "L40S-48GB", 1)
    assert columns[:4] == ["model", "dtype", "gpu", "tp"]


def test_the_library_grows_only_by_what_the_new_table_touches(
    catalog: Catalog, tmp_path: Path
) -> None:
    spec = read_scenario("tiny")

    def build() -> list:
        with Solvers(workers=0) as solvers:
            return [build_phase(catalog, p, solvers) for p in load_inputs(catalog, spec).phases]

    first = build()
    import_file(home_of(catalog), _parquet(catalog, tmp_path), None, None, NOW)
    assert [phase.solved for phase in build()] == [0, 0, 0]  # another model: nothing to do
    seed_csv(catalog, tmp_path / "a.csv", 1.1)
    import_file(home_of(catalog), tmp_path / "a.csv", None, None, NOW)
    second = build()
    with_l40s = sum("L40S x1" in c for c in _combinations(catalog, spec))
    for phase, before in zip(second, first, strict=True):
        assert 0 < phase.solved <= with_l40s
        assert phase.reused == before.combinations - phase.solved
    assert [phase.solved for phase in build()] == [0, 0, 0]


def _parquet(catalog: Catalog, tmp_path: Path) -> Path:
    raw = read_measurements(file_of(tmp_path, measurements()))
    profile = profile_of(raw, "small", gpu_named("CPU", known_of(catalog), raw))
    write_profile_file(profile, tmp_path / "small.parquet")
    return tmp_path / "small.parquet"


def _combinations(catalog: Catalog, spec) -> list[str]:
    combinations = load_inputs(catalog, spec).phases[0].combinations
    return [str(combinations.combination(row)) for level in combinations.by_size for row in level]


def broken(path: Path, frame: pl.DataFrame, kind: str) -> None:
    rows = frame.to_dicts()
    last = max(
        (r for r in rows if r["phase"] == "decode"), key=lambda r: (r["context"], r["batch"])
    )
    if kind == "falls":
        last["linear_ms"] = last["attn_ms"] = 1e-4
    elif kind == "zero":
        last["linear_ms"] = last["attn_ms"] = 0.0
    elif kind == "phase":
        last["phase"] = "train"
    elif kind == "empty":
        last["batch"] = None
    elif kind == "two":
        last["gpu"] = "H100-SXM-80GB"
    elif kind == "model":
        rows = [{**r, "model": "Qwen/Qwen3-15B"} for r in rows]
    elif kind == "nothing":
        rows = []
    found = pl.DataFrame(rows, schema=frame.schema)
    (found.drop("attn_ms") if kind == "column" else found).write_csv(path)


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (
            "falls",
            MissingProfileError,
            r"decode of batch \d+, .* context \d+ takes 0.0002",
        ),
        ("zero", MissingProfileError, "must be positive"),
        ("phase", ProfileFileError, r"row \d+: phase 'train'"),
        ("empty", ProfileFileError, r"row \d+: batch is None"),
        ("two", ProfileFileError, "several values of gpu"),
        ("model", UnknownNameError, r"'Qwen/Qwen3-15B'.*did you mean"),
        ("column", ProfileFileError, "lacks the column 'attn_ms'"),
        ("nothing", ProfileFileError, "no rows"),
    ],
)
def test_a_wrong_csv_is_refused_and_nothing_is_written(
    catalog: Catalog, tmp_path: Path, kind: str, error: type, said: str
) -> None:
    path = tmp_path / "a.csv"
    broken(path, seed_csv(catalog, path), kind)
    before = performance_in(catalog).rows
    with pytest.raises(error, match=said) as caught:
        import_file(home_of(catalog), path, None, None, NOW)
    assert caught.value.exit_code == 2
    assert performance_in(catalog).rows == before


@pytest.mark.parametrize("content", [b"", b"PAR1 no", b"{}"])
def test_no_profile_at_all(catalog: Catalog, tmp_path: Path, content: bytes) -> None:
    for name in ("a.parquet", "a.json"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ProfileFileError, match=name):
            import_file(home_of(catalog), tmp_path / name, None, None, NOW)
    with pytest.raises(ProfileFileError, match="no file"):
        import_file(home_of(catalog), tmp_path / "b.csv", None, None, NOW)


def test_a_gpu_and_a_model_that_are_known_stay_as_they_are(
    catalog: Catalog, tmp_path: Path
) -> None:
    before = known_of(catalog)
    raw = read_measurements(file_of(tmp_path, measurements()))
    profile = profile_of(raw, "small", gpu_named("L4", before, raw))
    import_profile(catalog, profile, NOW)
    assert known_of(catalog).gpus == before.gpus
    import_profile(catalog, replace(profile, source="again"), NOW)
    assert len(performance_in(catalog).rows["small", "float32", "L4-24GB", 1]) == 15


def test_a_plot_shows_a_table(catalog: Catalog, tmp_path: Path) -> None:
    import_file(home_of(catalog), file_of(tmp_path, measurements()), "CPU", None, NOW)
    view = read_table(home_of(catalog), "small", "CPU", 1)
    draw_table(view, tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    with pytest.raises(InputError, match="cannot draw into"):
        draw_table(view, tmp_path / "a.docx")
    with pytest.raises(MissingProfileError, match="no measured table of small on L4"):
        read_table(home_of(catalog), "small", "L4", 1)


def test_factors_that_are_saved_are_planned_with(catalog: Catalog, known: Known) -> None:
    gpu, dtype, fit = calibrate(home_of(catalog), "L40S", "moe", True)
    found = performance_in(catalog).calibrations[gpu.profile_name, "moe", dtype]
    assert found.compute_efficiency == pytest.approx(fit.calibration.compute_efficiency)
    with pytest.raises(MissingProfileError, match="no dense layer of T4"):
        calibrate(home_of(catalog), "T4", "dense", False)


def test_a_hop_is_a_latency_and_time_for_every_byte(tmp_path: Path) -> None:
    rows = read_measurements(file_of(tmp_path, measurements())).links.hop
    hop = hop_of([(row.bytes, row.ms) for row in rows])
    assert hop is not None
    per_byte = 1e-6 * 1e6 / 2**20
    assert hop.ms_per_byte == pytest.approx(per_byte)
    assert hop.latency_ms == pytest.approx(0.1 - 1024 * per_byte)
    assert hop_of([(1024, 0.1)]) is None


FAKE = """
import json, sys
from pathlib import Path
folder, out = sys.argv[1:3]
print(json.dumps({{"what": "a point", "done": 1, "total": 2}}), flush=True)
{work}
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A profiler that writes what the test says."""

    def install(work: str) -> None:
        script = tmp_path / "fake.py"
        script.write_text(FAKE.format(work=work))
        monkeypatch.setattr("tasks.profile_run.START", script)
        monkeypatch.setattr("tasks.profile_run.require_torch", lambda _: Path(sys.executable))

    return install


REQUEST = ProfileRequest(CONFIG, "small", minutes=1.0)


def test_the_profiler_is_run_with_the_config_and_its_progress_is_passed_on(
    fake, tmp_path: Path
) -> None:
    from tasks.progress import watched_by

    fake("Path(out).write_text(Path(folder, 'config.json').read_text() + ' '.join(sys.argv[3:]))")
    seen = []
    with watched_by(lambda *said: seen.append(said)):
        out = run_profiler(replace(REQUEST, tp=(1, 2), force=True), tmp_path / "deep" / "a.json")
    assert out.read_text().startswith(json.dumps(CONFIG))
    assert "--minutes 1 " in out.read_text() and "--tp 1 2" in out.read_text()
    assert "--force" in out.read_text()
    assert seen == [("measure small (s)", 1, 2)]


@pytest.mark.parametrize(("code", "error"), [(2, ProfilerRefusedError), (1, ProfilerError)])
def test_the_profilers_own_sentence_reaches_the_user(fake, tmp_path, code, error) -> None:
    fake(f"sys.stderr.write('noise\\nthe GPU is busy\\n'); sys.exit({code})")
    with pytest.raises(error, match="the GPU is busy"):
        run_profiler(REQUEST, tmp_path / "a.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "tpu"}, "unknown device 'tpu': auto, cuda, cpu"),
        ({"backend": "jax"}, "unknown backend"),
        ({"dtype": "int4"}, "unknown dtype"),
        ({"device": "cpu", "tp": (2,)}, "needs 2 core groups"),
        ({"python": "nowhere/python"}, "no interpreter at nowhere/python"),
    ],
)
def test_wrong_requests(change: dict, said: str) -> None:
    with pytest.raises(ProfilerRefusedError, match=said):
        check_request(replace(REQUEST, **change), here=True)


def test_models_that_cannot_be_measured(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "architectures": ["GPT2LMHeadModel"]})
    )
    with pytest.raises(ModelConfigError, match=r"GPT2LMHeadModel .* supported: LlamaForCausalLM"):
        read_model(tmp_path, None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ProfilerRefusedError, match=r"is no config\.json"):
        read_model(tmp_path, None)
    with pytest.raises(ProfilerRefusedError, match="cannot be read"):
        read_model(tmp_path / "other", None)


def test_one_worker_of_every_host_with_a_gpu() -> None:
    workers = {
        "tcp://b:2": {"host": "b", "resources": {"GPU": 1.0}},
        "tcp://b:1": {"host": "b", "resources": {"GPU": 1.0}},
        "tcp://a:1": {"host": "a", "resources": {}},
        "tcp://c:1": {"host": "c", "resources": {"GPU": 2.0}},
    }
    assert one_worker_per_host(workers) == ["tcp://b:1", "tcp://c:1"]


def test_every_gpu_host_of_a_cluster_measures_once(fake, tmp_path: Path) -> None:
    fake("Path(out).write_text('points of ' + Path(folder, 'config.json').read_text())")
    with distributed.LocalCluster(
        n_workers=2, processes=False, protocol="tcp", dashboard_address=None,
        resources={"GPU": 1},
    ) as cluster:  # fmt: skip
        found = profile_on_workers(cluster.scheduler_address, REQUEST, tmp_path / "out")
    assert len(found) == 1 and found[0].name.startswith("small-")
    assert found[0].read_text().startswith("points of ")


def test_a_cluster_without_gpus_says_how_to_start_them(tmp_path: Path) -> None:
    with (
        distributed.LocalCluster(
            n_workers=1, processes=False, protocol="tcp", dashboard_address=None
        ) as cluster,
        pytest.raises(SchedulerMismatchError, match='--resources "GPU=1"'),
    ):
        profile_on_workers(cluster.scheduler_address, REQUEST, tmp_path)
    with pytest.raises(SchedulerUnreachableError, match="no Dask scheduler answers"):
        profile_on_workers("tcp://127.0.0.1:9", REQUEST, tmp_path)

"""The performance model: reproduces the calibration's errors, monotone, provenance per answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.seed import seed_folder
from planner.errors import MissingProfileError
from planner.known import Known
from planner.perf.grids import REACH, Line, Surface
from planner.perf.model import PerformanceModel
from planner.perf.overhead import EnginePoint, fit_engine_overhead
from planner.perf.roofline import Roofline, default_calibration
from planner.perf.tables import LayerRow, LayerTable
from planner.types import NodeClass, Provenance


def classes(known: Known) -> dict[str, NodeClass]:
    return {kind.node.name: kind.node for kind in known.instance_types}


MODELS = {
    "dense": ["Qwen/Qwen3-14B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.3-70B-Instruct"],
    "moe": ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"],
}


@pytest.mark.parametrize("scope", ["dense", "moe"])
@pytest.mark.parametrize("gpu", ["H100-SXM-80GB", "A100-SXM-80GB", "L40S-48GB"])
def test_roofline_reproduces_the_errors_that_its_calibration_states(
    gpu: str, scope: str, known: Known, performance: PerformanceModel
) -> None:
    """The seed says how far op_max with these factors is from the tables: so must ours be."""
    stated = pl.read_csv(seed_folder() / "calibration.csv").filter(
        (pl.col("gpu") == gpu) & (pl.col("scope") == scope) & (pl.col("dtype") == "bf16")
    )
    spec = next(n.gpu for n in classes(known).values() if n.gpu.profile_name == gpu)
    calibration = performance.calibrations[gpu, scope, "bf16"]
    errors: dict[str, list[float]] = {"prefill": [], "decode": []}
    for (model, dtype, profile, tp), rows in performance.rows.items():
        if profile != gpu or dtype != "bf16" or model not in MODELS[scope]:
            continue
        roofline = Roofline(known.models[model], spec, tp, calibration)
        for row in rows:
            measured = row.linear_ms + row.attention_ms
            if row.phase == "decode":
                ours = roofline.decode_layer_ms(np.array([row.batch]), np.array([row.context]))[0]
            else:
                one = np.array([row.tokens / row.batch])
                ours = roofline.prefill_linear_ms(np.array([float(row.tokens)]))[0]
                attention = roofline.prefill_attention_ms(one, np.array([float(row.context)]))
                ours += row.batch * attention[0]
            errors[row.phase].append(abs(ours / measured - 1.0) * 100.0)
    for phase, values in errors.items():
        assert np.median(values) == pytest.approx(stated[f"{phase}_err_median_pct"][0], abs=1.2)


def test_measured_tables_answer_their_own_points(
    known: Known, performance: PerformanceModel
) -> None:
    node = classes(known)["H100 x8"]
    model = known.models["Qwen/Qwen3-32B"]
    key = (model.name, "bf16", node.gpu.profile_name, 1)
    decode = [row for row in performance.rows[key] if row.phase == "decode"]
    for row in decode:
        step = performance.decode_step(
            model, "bf16", node, 1, np.array([float(row.batch)]), np.array([float(row.context)])
        )
        # Monotone repair lifts a point by what a smaller one measured, at most a few per cent.
        assert step.layer_ms[0] == pytest.approx(row.linear_ms + row.attention_ms, rel=0.06)
        assert step.layer_ms[0] >= row.linear_ms + row.attention_ms - 1e-9
    prompt = next(r for r in performance.rows[key] if (r.phase, r.tokens) == ("prefill", 2048))
    step = performance.prefill_step(model, "bf16", node, 1, np.array([1.0]), 2048.0)
    assert step.layer_ms[0] == pytest.approx(prompt.linear_ms + prompt.attention_ms, rel=0.02)


@given(
    st.sampled_from(["H100 x1", "L40S x1", "L4 x1", "A10G x1"]),
    st.sampled_from(["Qwen/Qwen3-14B", "Qwen/Qwen3-235B-A22B"]),
    st.integers(1, 400),
    st.integers(1, 20_000),
    st.integers(0, 40),
    st.integers(0, 4_000),
)
def test_more_work_never_takes_less_time(node_name, model_name, batch, context, more, longer):
    known, performance = _shared
    node, model = classes(known)[node_name], known.models[model_name]

    def decode(b: float, c: float) -> float:
        step = performance.decode_step(model, "bf16", node, 1, np.array([b]), np.array([c]))
        return float(step.layer_ms[0] + step.head_ms[0])

    assert decode(batch + more, context + longer) >= decode(batch, context) * (1 - 1e-12)
    if context + longer < 100_000:
        ours = performance.prefill_step(model, "bf16", node, 1, np.array([2.0]), float(context))
        longer_prompts = performance.prefill_step(
            model, "bf16", node, 1, np.array([2.0]), float(context + longer)
        )
        assert longer_prompts.layer_ms[0] >= ours.layer_ms[0] * (1 - 1e-12)


@pytest.fixture(autouse=True)
def _share(known: Known, performance: PerformanceModel) -> None:
    """Hypothesis examples read session data through a module name."""
    global _shared
    _shared = (known, performance)


@given(
    st.lists(st.floats(0.01, 100.0), min_size=12, max_size=12),
    st.floats(0.0, 40.0),
    st.floats(0.0, 40.0),
    st.floats(0.0, 5.0),
    st.floats(0.0, 5.0),
)
def test_any_surface_is_monotone(z, x, y, dx, dy):
    xs, ys = [1.0, 2.0, 4.0, 8.0], [1.0, 3.0, 9.0]
    surface = Surface.of([a for a in xs for _ in ys], ys * 4, z)
    low = surface(np.array([x]), np.array([y]))[0]
    high = surface(np.array([x + dx]), np.array([y + dy]))[0]
    assert high >= low * (1 - 1e-12)


def test_nothing_is_answered_far_beyond_the_table() -> None:
    line = Line.of([1.0, 2.0], [1.0, 3.0])
    assert line(np.array([0.5, 1.5, 4.0])).tolist() == [1.0, 2.0, 7.0]
    assert np.isinf(line(np.array([2.0 * REACH + 1.0]))).all()


def test_provenance_is_the_worst_of_what_was_used(
    known: Known, performance: PerformanceModel
) -> None:
    model = known.models["Qwen/Qwen3-32B"]

    def of(name: str, tp: int) -> Provenance:
        return performance.provenance(model, "bf16", classes(known)[name], tp)

    assert of("H100 x8", 8) is Provenance.MEASURED
    assert of("L40S x1", 1) is Provenance.CALIBRATED  # measured layers, engine never fitted
    assert of("L40S x4", 4) is Provenance.CALIBRATED  # PCIe all-reduce of another host
    assert of("L4 x1", 1) is Provenance.CALIBRATED
    assert of("L4 x4", 4) is Provenance.ESTIMATED  # no all-reduce of four L4 was measured
    assert of("A10G x1", 1) is Provenance.ESTIMATED
    assert performance.source(model, "bf16", classes(known)["A10G x1"], 1).startswith("roof")
    assert "silicon" in performance.source(model, "bf16", classes(known)["H100 x1"], 1)


def test_all_reduce_belongs_to_the_node_class(known: Known, performance: PerformanceModel) -> None:
    message = np.array([16e6])
    reduce = performance.all_reduce
    h100 = reduce.ms(classes(known)["H100 x8"], 8, message)[0]
    l4 = reduce.ms(classes(known)["L4 x8"], 8, message)[0]
    assert l4 > 50 * h100  # NVSwitch against PCIe
    assert reduce.ms(classes(known)["L4 x8"], 1, message)[0] == 0.0


def test_a_gpu_without_any_calibration_gets_the_class_default(known: Known) -> None:
    dense, moe = known.models["Qwen/Qwen3-14B"], known.models["Qwen/Qwen3-30B-A3B"]
    low_power = classes(known)["L4 x1"].gpu
    fast = classes(known)["H100 x1"].gpu
    assert default_calibration(dense, low_power).compute_efficiency == 0.42
    assert default_calibration(dense, fast).compute_efficiency == 0.70
    assert default_calibration(moe, fast).compute_efficiency == 0.40


def test_a_dtype_without_table_or_roofline_is_a_missing_profile(
    known: Known, performance: PerformanceModel
) -> None:
    with pytest.raises(MissingProfileError, match=r"Qwen3-14B in fp8 on L4 .*leave L4 out"):
        performance.decode_step(
            known.models["Qwen/Qwen3-14B"],
            "fp8",
            classes(known)["L4 x1"],
            1,
            np.array([1.0]),
            np.array([1.0]),
        )


def test_four_bit_experts_without_a_table_are_an_estimate(
    known: Known, performance: PerformanceModel
) -> None:
    model, node = known.models["openai/gpt-oss-120b"], classes(known)["A10G x8"]
    assert performance.provenance(model, "mxfp4", node, 8) is Provenance.ESTIMATED
    one = np.array([1.0])
    step = performance.decode_step(model, "mxfp4", node, 8, one, 512 * one).layer_ms[0]
    sixteen_bit = replace(model, expert_weight_bytes=2.0)
    slower = performance.decode_step(sixteen_bit, "mxfp4", node, 8, one, 512 * one).layer_ms[0]
    assert 0 < step < slower


def test_broken_tables_are_refused() -> None:
    def row(phase: str, tokens: int, context: int, linear: float = 1.0) -> LayerRow:
        return LayerRow(phase, 1, tokens, context, linear, 0.1, 0.1, "test")

    with pytest.raises(MissingProfileError, match="both prefill and decode"):
        LayerTable.of("X", [row("decode", 1, 0)])
    with pytest.raises(MissingProfileError, match="positive"):
        LayerTable.of("X", [row("decode", 1, 0, 0.0), row("prefill", 1, 0)])
    with pytest.raises(MissingProfileError, match=r"decode of batch 1, 1 tokens.* has nan"):
        LayerTable.of("X", [row("decode", 1, 0, float("nan")), row("prefill", 1, 0)])
    with pytest.raises(MissingProfileError, match=r"8 tokens.* takes 1.1 ms, less work .* 9.1 ms"):
        LayerTable.of("X", [row("decode", 1, 0), row("prefill", 4, 0, 9.0), row("prefill", 8, 0)])
    with pytest.raises(MissingProfileError, match=r"holes: 1 points of its grid, first \(1, 9\)"):
        LayerTable.of(
            "X", [row("decode", 1, 0), *(row("prefill", t, c) for t, c in ((1, 0), (2, 0), (2, 9)))]
        )


def test_engine_overhead_is_fitted_per_family_and_lowers_the_error_on_unseen_points(
    performance: PerformanceModel,
) -> None:
    assert performance.engine_overhead_ms.keys() == {"9.0", "10.0"}  # nothing assumed elsewhere
    points = pl.read_csv(seed_folder() / "measured_vllm_points.csv").filter(
        (pl.col("split") == "test") & pl.col("system").is_in(["h100_sxm", "h200_sxm"])
    )
    measured = points["measured_tpot_ms"].to_numpy()
    predicted = points["table_model_tpot_ms"].to_numpy()
    overhead = performance.engine_overhead_ms["9.0"]

    def error(values) -> float:
        return float(np.median(np.abs(values / measured - 1.0)))

    assert 0.1 < overhead < 0.6  # the seed's README: 0.25 to 0.5 ms
    assert error(predicted + overhead) < error(predicted)
    assert error(predicted + overhead) < 0.06


def test_models_with_runs_of_their_own_have_their_own_overhead(
    performance: PerformanceModel, known: Known
) -> None:
    """Qwen3-32B on H100, fitted on its `fit` rows, on its `test` rows."""
    hopper = classes(known)["H100 x1"].gpu
    shared, own = (performance.overhead_ms(hopper, name) for name in ("", "Qwen/Qwen3-32B"))
    assert performance.overhead_ms(hopper, "Qwen/Qwen3-14B") == shared < own
    points = pl.read_csv(seed_folder() / "measured_vllm_points.csv").filter(
        (pl.col("split") == "test")
        & (pl.col("model") == "Qwen/Qwen3-32B")
        & (pl.col("system") == "h100_sxm")
    )
    measured = points["measured_tpot_ms"].to_numpy()
    predicted = points["table_model_tpot_ms"].to_numpy()
    errors = [np.median(np.abs((predicted + x) / measured - 1.0)) for x in (own, shared)]
    assert errors[0] < 0.7 * errors[1]


def test_overhead_is_never_negative() -> None:
    points = [EnginePoint("x", 10.0, predicted) for predicted in (11.0, 12.0, 13.0)]
    assert fit_engine_overhead(points) == {"x": 0.0}
    points = [EnginePoint("x", 10.0, predicted) for predicted in (9.5, 9.0, 8.0)]
    assert fit_engine_overhead(points)["x"] == pytest.approx(1.0)


def test_mixed_steps_are_decode_steps_plus_new_tokens(
    known: Known, performance: PerformanceModel
) -> None:
    model, batch, context = known.models["Qwen/Qwen3-32B"], np.array([32.0]), np.array([1024.0])
    for name in ("H100 x1", "L4 x1"):
        node = classes(known)[name]

        def mixed(tokens: float, node=node) -> float:
            step = performance.mixed_step(
                model, "bf16", node, 1, batch, context, np.array([tokens]), 1024.0
            )
            return float(step.layer_ms[0])

        alone = performance.decode_step(model, "bf16", node, 1, batch, context).layer_ms[0]
        whole = performance.prefill_step(model, "bf16", node, 1, np.array([1.0]), 1024.0)
        assert mixed(0.0) == pytest.approx(alone, rel=0.08)
        assert mixed(0.0) < mixed(100.0) < mixed(1024.0)
        # One prompt mixed into a step costs about its own prefill, less the weights read once.
        assert mixed(1024.0) < alone + whole.layer_ms[0]
        assert mixed(1024.0) > whole.layer_ms[0]


def test_predicted_tpot_of_aggregated_serving_is_near_the_measured_one(
    known: Known, performance: PerformanceModel
) -> None:
    """Unseen H100 and H200 points: C of P5 with M = 1 against vLLM."""
    points = pl.read_csv(seed_folder() / "measured_vllm_points.csv").filter(
        (pl.col("split") == "test")
        & pl.col("system").is_in(["h100_sxm"])
        & pl.col("model").is_in(sorted(known.models))
        & (pl.col("concurrency") >= 8)
    )
    node = classes(known)["H100 x8"]
    errors = []
    for row in points.iter_rows(named=True):
        model, b = known.models[row["model"]], float(row["concurrency"])
        if (model.name, model.dtype, node.gpu.profile_name, row["tp"]) not in performance.rows:
            continue
        step = performance.mixed_step(
            model,
            model.dtype,
            node,
            row["tp"],
            np.array([b]),
            np.array([row["isl"] + row["osl"] / 2]),
            np.array([b * row["isl"] / row["osl"]]),
            float(row["isl"]),
        )
        tpot = model.layers * step.layer_ms[0] + step.head_ms[0]
        tpot += performance.overhead_ms(node.gpu, model.name)
        errors.append(abs(tpot / row["measured_tpot_ms"] - 1))
    assert len(errors) >= 10
    assert np.median(errors) < 0.1

"""Layer rows from measured points, repair of tables, closed loops, calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from planner.errors import MissingProfileError
from planner.known import Known
from planner.perf.allreduce import AllReduce
from planner.perf.calibrate import fit_roofline
from planner.perf.depths import NoisyProfileError, layer_of_depths
from planner.perf.model import PerformanceModel
from planner.perf.points import LayerPoint, rows_of, whole_grid
from planner.perf.repair import repair
from planner.perf.roofline import Calibration, Roofline
from planner.perf.serving import Loop, loop_figures
from planner.perf.tables import LayerRow, LayerTable
from planner.types import Link, NodeClass, Provenance

BATCHES, CONTEXTS, TOKENS = (1, 4, 16), (32, 128, 512), (16, 64, 256)
KV_MS, SQUARE_MS = 2e-4, 3e-5


def linear(tokens: float) -> float:
    return 0.5 + 0.02 * tokens


def points() -> list[LayerPoint]:
    decode = [
        LayerPoint("decode", b, b, c, linear(b) + KV_MS * b * c) for b in BATCHES for c in CONTEXTS
    ]
    prefill = [
        LayerPoint("prefill", 1, n, c, linear(n) + SQUARE_MS * (n * c + n * n / 2))
        for n in TOKENS
        for c in (0, 256)
    ]
    split = LayerPoint("prefill", 4, 256, 0, linear(256) + SQUARE_MS * 256**2 / 8)
    new = 64
    mixed = LayerPoint(
        "mixed", 4, 4 + new, 128, linear(68) + KV_MS * 4 * 128 + SQUARE_MS * new * new / 2
    )
    return [*decode, *prefill, split, mixed]


def test_linear_and_attention_parts_come_back() -> None:
    rows = {(r.phase, r.tokens, r.context): r for r in rows_of(points(), {1: 0.1, 16: 0.4}, "t")}
    assert len(rows) == 9 + 6 + 1
    for b in BATCHES:
        for c in CONTEXTS:
            assert rows["decode", b, c].linear_ms == pytest.approx(linear(b), rel=0.02)
            assert rows["decode", b, c].attention_ms == pytest.approx(
                KV_MS * b * c, rel=0.03, abs=0.006
            )
    assert rows["decode", 4, 32].head_ms == pytest.approx(0.1 + 0.3 * 3 / 15)
    for n in TOKENS:
        for c in (0, 256):
            wanted = SQUARE_MS * (n * c + n * n / 2)
            assert rows["prefill", n, c].attention_ms == pytest.approx(wanted, rel=0.02, abs=0.02)
    assert rows["mixed", 68, 128].linear_ms == pytest.approx(linear(68), rel=0.02)


def test_they_make_a_table_that_answers_mixed_steps() -> None:
    table = LayerTable.of("t", rows_of(points(), {1: 0.1}, "t"))
    assert float(table.mixed_linear_ms(np.array([68.0]))[0]) == pytest.approx(linear(68), rel=0.02)


def test_points_that_contradict_each_other_are_refused() -> None:
    assert layer_of_depths(3.0, 7.0, (1, 3), "x") == 2.0
    with pytest.raises(NoisyProfileError, match=r"a step of x took 3 ms with 3 layers"):
        layer_of_depths(3.0, 3.0, (1, 3), "x")
    with pytest.raises(NoisyProfileError, match="needs decode points"):
        rows_of([p for p in points() if p.kind == "decode"], {}, "t")


def test_lines_that_were_left_in_part_are_taken_out() -> None:
    grid = {(x, y) for x in (1, 4, 16) for y in (32, 512)}
    assert whole_grid(grid) == grid
    assert whole_grid(grid | {(16, 128)}) == grid  # two others were not reached
    assert whole_grid(grid | {(1, 128), (16, 128)}) == grid  # (4, 128) was not reached
    assert whole_grid(grid | {(8, 512)}) == grid
    more = [*points(), LayerPoint("decode", 8, 8, 512, 1.0), LayerPoint("prefill", 1, 32, 0, 1.2)]
    LayerTable.of("t", rows_of(more, {1: 0.1}, "t"))


def table_rows() -> list[LayerRow]:
    return list(rows_of([p for p in points() if p.batch != 4 or p.kind == "decode"], {}, "t"))


def at(rows: Sequence[LayerRow], phase: str, tokens: int, context: int) -> int:
    return next(
        n for n, r in enumerate(rows) if (r.phase, r.tokens, r.context) == (phase, tokens, context)
    )


def test_small_falls_are_lifted_and_said() -> None:
    rows = table_rows()
    low = at(rows, "decode", 4, 128)
    whole = rows[low].linear_ms + rows[low].attention_ms
    before = rows[at(rows, "decode", 1, 128)]
    target = 0.95 * (before.linear_ms + before.attention_ms)
    scale = target / whole
    rows[low] = replace(
        rows[low],
        linear_ms=rows[low].linear_ms * scale,
        attention_ms=rows[low].attention_ms * scale,
    )
    found = repair("t", rows)
    assert any("decode of batch 4, 4 tokens, context 128" in text for text in found.lifted)
    fixed = found.rows[low]
    floor = max(
        r.linear_ms + r.attention_ms
        for r in found.rows
        if r.phase == "decode" and r.batch <= 4 and r.context <= 128 and r is not fixed
    )
    assert fixed.linear_ms + fixed.attention_ms == pytest.approx(floor)
    assert repair("t", found.rows).lifted == ()


def test_outliers_are_named_and_steep_falls_refused() -> None:
    rows = table_rows()
    assert repair("t", rows).outliers == ()
    middle = at(rows, "prefill", 64, 0)
    rows[middle] = replace(rows[middle], linear_ms=1.6 * rows[middle].linear_ms)
    assert any("prefill of batch 1, 64 tokens" in text for text in repair("t", rows).outliers)
    last = at(rows, "prefill", 256, 0)
    rows[last] = replace(rows[last], linear_ms=0.1)
    with pytest.raises(MissingProfileError, match="256 tokens, context 0 takes"):
        repair("t", rows)


@pytest.fixture
def node(known: Known) -> NodeClass:
    gpu = next(k.node.gpu for k in known.instance_types if k.node.name == "H100 x1")
    return NodeClass("H100 x1", gpu, 1, Link.PCIE, 1.0, 1.0)


LOOPS = [
    (Loop(1, 64, 32), 0.02),
    (Loop(4, 64, 32), 0.02),
    (Loop(16, 64, 32), 0.02),
    (Loop(16, 128, 8), 0.05),  # one or two prompts in a step, priced as 1.8 in every one
]


@pytest.mark.parametrize(("loop", "within"), LOOPS)
def test_a_closed_loop_is_as_its_simulation(
    known: Known, node: NodeClass, loop: Loop, within: float
) -> None:
    """Every step of a loop priced by the same tables, one after another."""
    model = replace(known.models["Qwen/Qwen3-8B"], layers=3)
    key = (model.name, model.dtype, node.gpu.profile_name, 1)
    rows = list(rows_of(points(), {1: 0.1}, "t"))
    performance = PerformanceModel({key: rows}, {}, AllReduce({}, {}), {})
    table = LayerTable.of("t", rows)
    overhead, b, o, p = 0.7, loop.concurrency, loop.output_tokens, loop.prompt_tokens

    def step_ms(decodes: int, prompts: int) -> float:
        context, one = np.array([p + o / 2]), np.array([float(p)])
        if decodes == 0:
            linear_ms = table.prefill_linear_ms(prompts * one)
        elif prompts == 0:
            linear_ms = table.decode_layer_ms(np.array([float(decodes)]), context)
        else:
            linear_ms = table.mixed_linear_ms(np.array([decodes + prompts * p * 1.0]))
            linear_ms = linear_ms + table.decode_attention_ms(np.array([float(decodes)]), context)
        prompt_ms = prompts * table.prefill_attention_ms(one, np.zeros(1))
        return float(3 * (linear_ms + prompt_ms)[0]) + 0.1 + overhead

    left = [round(o * (n + 1) / b) for n in range(b)]  # tokens until each slot's end; o: its prompt
    now, gaps, ended = 0.0, [], 0
    for step in range(40 * o):
        prompts = sum(one == o for one in left)
        decodes = sum(0 < one < o for one in left)
        spent = step_ms(decodes, prompts) if prompts or decodes else 0.0
        if step >= 10 * o:
            now += spent
            gaps += [spent] * decodes
            ended += sum(one == 1 for one in left)
        left = [o if one == 0 else one - 1 for one in left]  # 0: the step between two requests
    found = loop_figures(performance, model, node, 1, loop, overhead)
    assert found.tpot_ms == pytest.approx(np.mean(gaps), rel=within)
    assert found.throughput_rps == pytest.approx(1e3 * ended / now, rel=within)
    assert 0.0 < found.layer_share < 1.0


FACTORS = Calibration(0.55, 0.66, 21.0, Provenance.CALIBRATED, "made")


def made_rows(roofline: Roofline) -> list[LayerRow]:
    rows = []
    for b in (1, 8, 64, 256):
        for c in (128, 2048):
            whole = float(roofline.decode_layer_ms(np.array([1.0 * b]), np.array([1.0 * c]))[0])
            rows.append(LayerRow("decode", b, b, c, 0.8 * whole, 0.2 * whole, 0.1, "made"))
    for n in (64, 512, 4096):
        attention = float(roofline.prefill_attention_ms(np.array([1.0 * n]), np.zeros(1))[0])
        linear_ms = float(roofline.prefill_linear_ms(np.array([1.0 * n]))[0])
        rows.append(LayerRow("prefill", 1, n, 0, linear_ms, attention, 0.1, "made"))
    return rows


def test_roofline_factors_come_back(known: Known, node: NodeClass) -> None:
    names = ["Qwen/Qwen3-14B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.3-70B-Instruct"]
    tables = {
        (name, tp): made_rows(Roofline(known.models[name], node.gpu, tp, FACTORS))
        for name in names
        for tp in (1, 2)
    }
    found = fit_roofline(node.gpu, known.models, tables, "t")
    assert found.calibration.compute_efficiency == pytest.approx(0.55, rel=0.02)
    assert found.calibration.bandwidth_efficiency == pytest.approx(0.66, rel=0.02)
    assert found.calibration.fixed_overhead_us == pytest.approx(21.0, rel=0.1)
    assert found.lomo_error_pct < 2.0
    part = {key: rows[:3] for key, rows in tables.items() if key == (names[0], 1)}
    alone = fit_roofline(node.gpu, known.models, part, "t")  # decode alone is a table for it too
    assert math.isnan(alone.lomo_error_pct) and math.isnan(alone.prefill_error_pct)
    assert alone.decode_error_pct < 2.0
    with pytest.raises(MissingProfileError, match="nothing of H100"):
        fit_roofline(node.gpu, known.models, {}, "t")


def test_a_model_left_out_is_predicted_by_the_others_alone(known: Known, node: NodeClass) -> None:
    first, second = "Qwen/Qwen3-14B", "Qwen/Qwen3-32B"
    slow = replace(FACTORS, compute_efficiency=0.275, bandwidth_efficiency=0.33,
                   fixed_overhead_us=42.0)  # fmt: skip
    tables = {
        (first, 1): made_rows(Roofline(known.models[first], node.gpu, 1, FACTORS)),
        (second, 1): made_rows(Roofline(known.models[second], node.gpu, 1, slow)),
    }
    found = fit_roofline(node.gpu, known.models, tables, "t")
    assert found.lomo_error_pct == pytest.approx((50.0 + 100.0) / 2, abs=8.0)


def test_the_shipped_tables_of_h100_give_the_shipped_factors(
    known: Known, node: NodeClass, performance: PerformanceModel
) -> None:
    tables = {
        (model, tp): rows
        for (model, dtype, profile, tp), rows in performance.rows.items()
        if profile == node.gpu.profile_name and dtype == "bf16" and not known.models[model].is_moe
        and known.models[model].dtype == "bf16"
    }  # fmt: skip
    shipped = performance.calibrations[node.gpu.profile_name, "dense", "bf16"]
    found = fit_roofline(node.gpu, known.models, tables, "t")
    assert found.calibration.compute_efficiency == pytest.approx(
        shipped.compute_efficiency, abs=0.05
    )
    assert found.calibration.bandwidth_efficiency == pytest.approx(
        shipped.bandwidth_efficiency, abs=0.05
    )
    assert found.lomo_error_pct < 8.0

"""Layers and engine apart: steps made from known parts give the parts back."""

from __future__ import annotations

import pytest

from planner.perf.depths import DepthSteps, NoisyProfileError, separate
from planner.perf.overhead import EnginePoint, fit_engine_overhead
from planner.perf.tables import LayerTable

OVERHEAD, BATCHES, CONTEXTS, TOKENS = 0.8, (1, 4, 8), (32, 128, 384), (16, 64, 256)


def linear(tokens: int) -> float:
    return 0.5 + 0.01 * tokens


def prompt_attention(tokens: int) -> float:
    return 1e-5 * tokens**2


def head(batch: int) -> float:
    return 0.02 * (batch - 1)


def steps(layers: int) -> DepthSteps:
    return DepthSteps(
        layers,
        {
            (b, c): layers * (linear(b) + 1e-3 * b * c) + head(b) + OVERHEAD
            for b in BATCHES
            for c in CONTEXTS
        },
        {
            (k, n): layers * (linear(n) + prompt_attention(n // k) * k) + 3.0
            for k, n in [*((1, n) for n in TOKENS), (4, 256)]
        },
    )


def test_the_parts_come_back() -> None:
    found = separate(steps(2), steps(6), "made up")
    rows = {(r.phase, r.tokens, r.context): r for r in found.rows}
    assert len(rows) == len(BATCHES) * len(CONTEXTS) + len(TOKENS)
    for batch in BATCHES:
        for context in CONTEXTS:
            row = rows["decode", batch, context]
            assert row.linear_ms == pytest.approx(linear(batch), rel=1e-3)
            assert row.attention_ms == pytest.approx(1e-3 * batch * context, rel=1e-2)
            assert row.head_ms == pytest.approx(head(batch), abs=1e-9)
    long = rows["prefill", 256, 0]
    assert long.attention_ms == pytest.approx(prompt_attention(256), rel=1e-3)
    assert long.linear_ms == pytest.approx(linear(256), rel=1e-3)
    points = [EnginePoint("0.0", r.measured_tpot_ms, r.predicted_tpot_ms) for r in found.engine]
    assert fit_engine_overhead(points)["0.0"] == pytest.approx(OVERHEAD)


def test_the_rows_make_a_table_without_zeros() -> None:
    table = LayerTable.of("t", separate(steps(2), steps(6), "made up").rows)
    assert float(table.decode_layer_ms(4.0, 128.0)) == pytest.approx(
        linear(4) + 1e-3 * 512, rel=0.01
    )
    short = separate(steps(2), steps(6), "made up").rows
    assert min(min(row.linear_ms, row.attention_ms) for row in short) > 0


def test_more_layers_in_less_time_is_refused() -> None:
    with pytest.raises(NoisyProfileError, match="measure again"):
        separate(steps(2), DepthSteps(6, steps(1).decode, steps(6).prefill), "made up")

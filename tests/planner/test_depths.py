"""Layers out of whole steps: steps made from known parts give the parts back."""

from __future__ import annotations

import pytest

from planner.perf.depths import NoisyProfileError, layer_of_depths, linear_of_batch, split_layer

LINEAR_MS, PER_TOKEN_MS, REST_MS = 0.6, 1e-3, 0.8


def step_ms(layers: int, batch: int, context: int) -> float:
    return layers * (LINEAR_MS + PER_TOKEN_MS * batch * context) + REST_MS


def test_the_parts_come_back() -> None:
    contexts = (32, 128, 384)
    layer = {
        (4, c): layer_of_depths(step_ms(2, 4, c), step_ms(6, 4, c), (2, 6), "a decode")
        for c in contexts
    }
    assert linear_of_batch(4, layer) == pytest.approx(LINEAR_MS)
    for context in contexts:
        parts = split_layer(layer[4, context], layer[4, context] - LINEAR_MS)
        assert parts == pytest.approx((LINEAR_MS, PER_TOKEN_MS * 4 * context))


def test_no_part_is_zero() -> None:
    assert min(split_layer(1.0, 0.0)) > 0
    assert min(split_layer(1.0, 2.0)) > 0
    falling = {(1, 32): 1.0, (1, 384): 0.9}  # noise: less time over more context
    assert linear_of_batch(1, falling) == 0.9


def test_more_layers_in_less_time_is_refused() -> None:
    with pytest.raises(NoisyProfileError, match=r"a decode took .* measure again"):
        layer_of_depths(2.0, 1.0, (2, 6), "a decode")

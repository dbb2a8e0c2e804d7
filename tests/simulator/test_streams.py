"""Streams: what is repeated, scaled, drawn and mixed keeps its rates and lengths."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.streams import (
    LengthHistogram,
    Stream,
    drawn_stream,
    mixed_trace,
    scaled_arrivals,
    scaled_trace,
)
from tests.builders import workload


def stream(at: list[float]) -> Stream:
    size = np.arange(1, len(at) + 1)
    return Stream(np.array(at), size, 10 * size)


def test_a_factor_of_one_changes_nothing() -> None:
    at = np.sort(np.random.default_rng(0).random(500))
    index, moved = scaled_arrivals(at, 1.0, np.random.default_rng(1))
    assert np.array_equal(index, np.arange(500)) and np.array_equal(moved, at)


@pytest.mark.parametrize("factor", [0.3, 2.0, 3.7])
def test_scaled_streams_keep_minutes_and_lengths(factor: float) -> None:
    rng = np.random.default_rng(2)
    at = np.sort(np.concatenate([600 * rng.random(3000), 600 + 600 * rng.random(9000)]))
    whole = Stream(at, rng.integers(1, 100, 12_000), rng.integers(1, 100, 12_000))
    found = whole.scaled(factor, rng)
    assert (np.diff(found.at_s) >= 0).all() and found.at_s[0] >= 0.0 and found.at_s[-1] <= at[-1]
    assert found.at_s.size == pytest.approx(factor * 12_000, rel=0.03)
    early = (found.at_s < 600).sum() / found.at_s.size
    assert early == pytest.approx(0.25, abs=0.03)
    assert found.input_tokens.mean() == pytest.approx(whole.input_tokens.mean(), rel=0.05)


def test_a_short_stream_begins_again() -> None:
    found = stream([0.0, 30.0, 70.0]).during(5.0)  # two minutes long
    assert found.at_s.tolist() == [0, 30, 70, 120, 150, 190, 240, 270]
    assert found.input_tokens.tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert stream([0.0, 30.0, 70.0]).during(0.6).at_s.tolist() == [0.0, 30.0]


def test_the_busy_rate_is_that_of_the_p95_minute() -> None:
    counts = [60] * 19 + [600]
    at = [60.0 * k + 60.0 * i / n for k, n in enumerate(counts) for i in range(n)]
    assert stream(at).busy_rps == pytest.approx(np.quantile(counts, 0.95) / 60.0)


def test_histograms_are_drawn_inside_their_bins() -> None:
    lengths = LengthHistogram(np.array([0.0, 100.0, 400.0, 800.0]), np.array([0.0, 0.25, 0.75]))
    drawn = lengths.draw(np.random.default_rng(3), 20_000)
    assert drawn.min() >= 100 and drawn.max() <= 800
    assert (drawn > 400).mean() == pytest.approx(0.75, abs=0.02)
    made = drawn_stream([50.0, 10.0], 1.0, 4.0, lengths, lengths, np.random.default_rng(4))
    per_minute = np.bincount((made.at_s // 60).astype(int), minlength=4)
    assert per_minute == pytest.approx([3000, 600, 3000, 600], rel=0.15)


def test_streams_of_workloads_become_one_trace() -> None:
    chat, code = workload("chat"), workload("code")
    trace = mixed_trace([chat, code], {"chat": stream([0.0, 2.0]), "code": stream([1.0])})
    assert trace.workload.tolist() == [0, 1, 0]
    assert trace.arrival_s.tolist() == [0.0, 1.0, 2.0]
    twice = scaled_trace(trace, 2.0, np.random.default_rng(5))
    assert np.bincount(twice.workload).tolist() == [4, 2]

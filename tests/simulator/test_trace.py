"""Traces: what is drawn has the workload's lengths and rates, what is wrong is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.errors import UnknownNameError
from simulator.errors import TraceError
from simulator.streams import steady_trace
from simulator.trace import Trace, draw_lengths, trace_of_rows
from tests.builders import MODEL, workload

ONE = np.array([1, 1, 1])


@pytest.mark.parametrize(("mean", "p95"), [(500.0, 1000.0), (28.0, 130.0), (100.0, 100.0)])
def test_drawn_lengths_have_mean_and_p95(mean: float, p95: float) -> None:
    drawn = draw_lengths(np.random.default_rng(3), mean, p95, 200_000)
    assert drawn.mean() == pytest.approx(mean, rel=0.03)
    assert np.quantile(drawn, 0.95) == pytest.approx(p95, rel=0.03)
    assert drawn.min() >= 1


def test_rates_follow_the_shape() -> None:
    chat = workload()
    drawn = steady_trace([chat], {"chat": 50.0}, 4.5, 0, shape=(1.0, 0.2))
    per_minute = np.bincount((drawn.arrival_s // 60).astype(int))
    assert per_minute == pytest.approx([3000, 600, 3000, 600, 1500], rel=0.15)
    assert drawn.duration_s < 270.0


def test_seeds_decide() -> None:
    chat = workload()
    first, same, other = (steady_trace([chat], {"chat": 5.0}, 2, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.arrival_s, same.arrival_s)
    assert not np.array_equal(first.arrival_s[:50], other.arrival_s[:50])


@pytest.mark.parametrize(
    ("arrival_s", "inputs", "outputs", "says"),
    [
        ([0.0, 2.0, 1.0], [5, 5, 5], [5, 5, 5], "request 3 comes at 1 s"),
        ([-1.0, 2.0, 3.0], [5, 5, 5], [5, 5, 5], "request 1 of the trace has arrival_s -1"),
        ([0.0, 1.0, np.nan], [5, 5, 5], [5, 5, 5], "request 3 of the trace has arrival_s nan"),
        ([0.0, 1.0, 2.0], [5, -5, 5], [5, 5, 5], "request 2 of the trace has input_tokens -5"),
        ([0.0, 1.0, 2.0], [5, 5, 5], [5, 5, 0], "request 3 of the trace has output_tokens 0"),
    ],
)
def test_wrong_traces_are_refused(arrival_s, inputs, outputs, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        Trace(("chat",), np.array(arrival_s), ONE * 0, np.array(inputs), np.array(outputs))


def test_models_by_name() -> None:
    chat, code = workload("chat"), replace(workload("code"), model=replace(MODEL, name="x/other"))
    rows = (np.arange(3.0), ["code", "test/model-1B", "other"], ONE, ONE)
    assert trace_of_rows([chat, code], *rows).workload.tolist() == [1, 0, 1]
    with pytest.raises(UnknownNameError, match="model-1B"):
        trace_of_rows([chat, code], np.arange(3.0), ["chat", "model-1", "chat"], ONE, ONE)
    with pytest.raises(TraceError, match="several workloads run"):
        trace_of_rows([chat, workload("more")], np.arange(3.0), [MODEL.name] * 3, ONE, ONE)

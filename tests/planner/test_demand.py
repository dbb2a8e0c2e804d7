"""Forecasts against what came, on the shipped two weeks and on made-up streams."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from catalog.seed import seed_folder
from planner.demand import DemandError, DemandHistory, coverage, forecast_demand

DAY = 144  # windows of ten minutes


def servegen(model: str) -> DemandHistory:
    table = pl.read_parquet(seed_folder() / "demand_servegen_10min.parquet")
    rates = table.filter(pl.col("model") == model).sort("window_start_s")["rps"].to_numpy()
    return DemandHistory(model, 10.0, rates)


def history(rates: object, minutes: float = 10.0) -> DemandHistory:
    return DemandHistory("made up", minutes, np.asarray(rates, dtype=float))


@pytest.mark.parametrize("model", ["m-large", "m-mid", "m-small"])
def test_two_weeks_of_servegen_are_covered_as_asked_for(model: str) -> None:
    """After three days of history, p95 covers about 95% of the windows at a moderate price."""
    found = coverage(servegen(model), 20.0, first_window=3 * DAY)
    assert 0.94 <= found.covered <= 0.975
    assert found.planned_over_served < 1.45
    assert found.unserved_share < 0.02
    median = coverage(servegen(model), 20.0, 0.5, first_window=3 * DAY, every=9)
    assert 0.4 <= median.covered <= 0.75
    assert median.planned_over_served < found.planned_over_served


def test_it_is_better_than_the_last_rate_with_a_fixed_margin() -> None:
    """The same requests planned, fewer unserved."""
    data = servegen("m-large")
    found = coverage(data, 20.0, first_window=3 * DAY)
    rates, unserved, came = data.rates_rps, 0.0, 0.0
    for known in range(3 * DAY, rates.size - 1):
        actual = rates[known : known + 2]
        unserved += np.maximum(actual - found.planned_over_served * rates[known - 1], 0.0).sum()
        came += actual.sum()
    assert found.unserved_share < 0.8 * unserved / came


def test_a_constant_stream_needs_no_margin_and_an_outage_no_infinity() -> None:
    assert forecast_demand(history(np.full(300, 7.0)), 20.0).rate_rps == pytest.approx(7.0)
    assert forecast_demand(history(np.zeros(300)), 20.0).rate_rps == 0.0
    rates = np.full(300, 7.0)
    rates[280:295] = 0.0
    assert forecast_demand(history(rates), 20.0).rate_rps < 800.0


def test_a_rise_of_every_morning_is_planned_for_before_it_comes() -> None:
    rates = np.full(7 * DAY, 10.0)
    for day in range(7):
        rates[day * DAY + 54 : (day + 1) * DAY - 6] = 30.0  # from nine o'clock on
    rates = rates * np.random.default_rng(1).uniform(0.98, 1.02, rates.size)
    before = history(rates[: 6 * DAY + 53])
    found = forecast_demand(before, 30.0)
    assert found.seasonal_ratio is not None
    assert found.seasonal_ratio > 2.5
    assert found.rate_rps == pytest.approx(30.0, rel=0.1)
    night = forecast_demand(history(rates[: 6 * DAY + 30]), 30.0)
    assert night.rate_rps < 31.0


def test_without_an_earlier_day_only_the_recent_past_counts() -> None:
    rates = 10.0 * np.random.default_rng(2).uniform(0.9, 1.1, 60)
    found = forecast_demand(history(rates), 20.0)
    assert found.seasonal_ratio is None
    assert 10.0 < found.rate_rps < 12.5


def test_the_future_is_not_looked_at() -> None:
    rates = servegen("m-small").rates_rps.copy()
    before = forecast_demand(history(rates).until(1000), 20.0)
    rates[1000:] *= 5.0
    assert forecast_demand(history(rates).until(1000), 20.0) == before


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([1.0, float("nan"), 2.0], "window 1 has nan requests/s"),
        ([1.0, -2.0], "window 1 has -2.0 requests/s"),
        ([1.0] * 13, "has 13 windows of 10 minutes; a forecast over 20 minutes needs at least 14"),
    ],
)
def test_a_history_of_no_use_is_named(rates: list[float], message: str) -> None:
    with pytest.raises(DemandError) as caught:
        forecast_demand(history(rates), 20.0)
    assert message in str(caught.value)


def test_gaps_and_windows_of_no_length_are_named() -> None:
    with pytest.raises(DemandError, match="'x' has gaps or repeats: 3 windows of 10 minutes in 40"):
        DemandHistory.of("x", 10.0, [1.0, 1.0, 1.0], 40.0)
    with pytest.raises(DemandError, match="a window must last, got 0"):
        history([1.0], minutes=0.0)

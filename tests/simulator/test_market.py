"""The synthetic market keeps to what it was fitted to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from catalog.seed import seed_folder
from planner.types import Market
from simulator.errors import SimulationError
from simulator.market import MarketFit, SyntheticMarket
from tests.builders import offer


@pytest.fixture(scope="module")
def fit() -> MarketFit:
    return MarketFit.of((seed_folder() / "market_fit.json").read_text())


def offers(count: int = 40) -> list:
    return [
        offer(f"d{k}", "L4 x1", price, 10, market)
        for k in range(count)
        for market, price in ((Market.ON_DEMAND, 2.0), (Market.SPOT, 0.6))
    ]


def test_the_shipped_fit_is_that_of_the_shipped_traces() -> None:
    import polars as pl

    from bench.market_fit import fit_prices, fit_stock
    from bench.moving_market import DATA

    shipped = json.loads((seed_folder() / "market_fit.json").read_text())
    changes, memory, errors = fit_prices(pl.read_parquet(DATA / "spot_prices_azure_2026.parquet"))
    assert shipped["price_changes_per_day"] == pytest.approx(changes, abs=1e-4)
    assert shipped["price_memory"] == pytest.approx(memory, abs=1e-4)
    assert shipped["price_errors"] == pytest.approx(errors)
    stock = fit_stock(pl.read_parquet(DATA / "availability_16_nodes.parquet"))
    assert shipped["stock_steps"] == stock
    assert "synthetic" not in shipped["source"] and "fitted" in shipped["source"]


def test_paths_have_the_fitted_rates(fit: MarketFit) -> None:
    days = 20.0
    market = SyntheticMarket.draw(fit, offers(), 24 * days, 0)
    changes = [times.size - 1 for times, _ in market.prices.values()]
    assert np.mean(changes) / days == pytest.approx(fit.price_changes_per_day, rel=0.15)
    shares = np.concatenate(list(market.stock.values()))
    assert shares.mean() == pytest.approx(1.0, rel=0.1)
    drops = np.mean([(np.diff(path) < 0).mean() for path in market.stock.values()])
    steps = np.diff(fit.transitions, axis=1, prepend=0.0)
    weights = np.full(len(steps), 1 / len(steps)) @ np.linalg.matrix_power(steps, 20_000)
    assert drops == pytest.approx(float(weights @ np.tril(steps, -1).sum(axis=1)), rel=0.15)


def test_spot_moves_and_nothing_else(fit: MarketFit) -> None:
    given = offers(3)
    market = SyntheticMarket.draw(fit, given, 96.0, 1)
    for hours in (0.0, 17.3, 95.9):
        for before, after in zip(given, market.at(hours), strict=True):
            if before.market is Market.SPOT:
                assert after.price_usd_per_hour < 2.0
                assert after.stock == market.spot_stock(before, hours) >= 0
                assert after.stock_source == "synthetic"
            else:
                assert after == before
    assert [o.price_usd_per_hour for o in market.at(0.0)] == [o.price_usd_per_hour for o in given]


def test_seeds_and_kinds_decide(fit: MarketFit) -> None:
    one, same = (SyntheticMarket.draw(fit, offers(2), 48.0, 5) for _ in range(2))
    fewer = SyntheticMarket.draw(fit, offers(1), 48.0, 5)
    other = SyntheticMarket.draw(fit, offers(2), 48.0, 6)
    key = ("d0", "type-L4 x1")
    assert np.array_equal(one.stock[key], same.stock[key])
    assert np.array_equal(one.stock[key], fewer.stock[key])
    assert not np.array_equal(one.stock[key], other.stock[key])
    assert one.steps(0.0, 0.25) == pytest.approx([1 / 12, 2 / 12, 3 / 12])
    assert one.steps(0.25, 0.5) == pytest.approx([4 / 12, 5 / 12, 6 / 12])


def test_a_broken_fit_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match="market fit"):
        MarketFit.of("{}")

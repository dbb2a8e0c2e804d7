"""A moving market and demand for replays: real movements, lent to the offers of a scenario.

Every spot offer's price moves in the proportions of one Azure price history, every stock in those
of one availability trace with a shift of its own around the scenario's, and every workload's demand
in those of one ServeGen stream around the scenario's (`bench/data/market/README.md`). On-demand
prices stand still.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl

from bench.demand import shipped_histories
from planner.allocation.problem import AllocationInput
from planner.demand import DemandHistory, forecast_demand
from planner.perf.grids import Floats
from planner.types import Market, Offer

DATA = Path(__file__).parent / "data" / "market"
STREAMS = ("servegen-m-large", "servegen-m-mid", "servegen-m-small")
FIRST_DAY = 4  # of the demand histories: what is before is known
PRICES_FROM = datetime(2026, 4, 20)
SHIFT = timedelta(hours=7)  # between offers that follow the same availability trace
BELOW_ON_DEMAND = 0.99
STEADY = 0.5  # of the stock that no trace moves: on-demand nodes come more surely than spot


@dataclass(frozen=True)
class Moment:
    """The market and demand at one time."""

    hours: float  # since the replay's start
    data: AllocationInput  # prices, stock, and demand as forecast
    came_rps: dict[str, Floats]  # what came until the next moment, by workload, per window


class MovingMarket:
    """A scenario's input over time."""

    def __init__(self, data: AllocationInput, horizon_minutes: float) -> None:
        self.data, self.horizon_minutes = data, horizon_minutes
        self.histories = {h.name: h for h in shipped_histories()}
        self.prices = price_ratios(PRICES_FROM)
        self.stocks = [
            frame.sort("ts")
            for _, frame in sorted(
                pl.read_parquet(DATA / "availability_16_nodes.parquet").group_by("zone"),
                key=lambda item: str(item[0]),
            )
        ]
        self.kinds = sorted({(o.domain, o.instance_type) for o in data.offers})

    def moments(self, hours: float, every_minutes: float) -> Sequence[Moment]:
        """From the fifth day of demand on."""
        count = int(hours * 60 / every_minutes)
        step = every_minutes / 60.0
        return [self._moment(number * step, every_minutes) for number in range(count)]

    def _moment(self, hours: float, every_minutes: float) -> Moment:
        forecasts, came = {}, {}
        for number, workload in enumerate(self.data.workloads):
            history = self.histories[STREAMS[number % len(STREAMS)]]
            known = round((FIRST_DAY * 24 + hours) * 60 / history.window_minutes)
            scale = workload.demand_rps / _mean_of_the_week(history)
            found = forecast_demand(history.until(known), self.horizon_minutes)
            forecasts[workload.name] = scale * found.rate_rps
            last = known + round(every_minutes / history.window_minutes)
            came[workload.name] = scale * history.rates_rps[known:last]
        workloads = tuple(replace(w, demand_rps=forecasts[w.name]) for w in self.data.workloads)
        offers = tuple(self._offer(offer, hours) for offer in self.data.offers)
        return Moment(hours, replace(self.data, workloads=workloads, offers=offers), came)

    def _offer(self, offer: Offer, hours: float) -> Offer:
        kind = self.kinds.index((offer.domain, offer.instance_type))
        trace = self.stocks[kind % len(self.stocks)]
        time = trace["ts"][0] + timedelta(hours=hours) + SHIFT * (kind // len(self.stocks))
        at = int(trace["ts"].search_sorted(time, side="right")) - 1
        share = trace["available_nodes"][at] / trace["available_nodes"].mean()
        price = offer.price_usd_per_hour
        if offer.market is Market.SPOT:
            times, ratios = self.prices[kind % len(self.prices)]
            seen = int(np.searchsorted(times, hours, side="right")) - 1
            price = min(price * ratios[seen], BELOW_ON_DEMAND * self._on_demand(offer))
        return replace(
            offer,
            price_usd_per_hour=price,
            stock=round(offer.stock * (STEADY + (1.0 - STEADY) * share)),
        )

    def _on_demand(self, offer: Offer) -> float:
        return next(
            (
                o.price_usd_per_hour
                for o in self.data.offers
                if (o.domain, o.instance_type) == (offer.domain, offer.instance_type)
                and o.market is Market.ON_DEMAND
            ),
            math.inf,
        )


def _mean_of_the_week(history: DemandHistory) -> float:
    """Mean rate of the replay's first week: demand of the scenario is met on average."""
    day = round(24 * 60 / history.window_minutes)
    return float(history.rates_rps[FIRST_DAY * day : (FIRST_DAY + 7) * day].mean())


def price_ratios(start: datetime) -> list[tuple[Floats, Floats]]:
    """Of every price history the hours since `start` and the prices over that at `start`."""
    table = pl.read_parquet(DATA / "spot_prices_azure_2026.parquet")
    found = []
    for _, frame in sorted(
        table.group_by("location", "instance_type"), key=lambda item: [str(x) for x in item[0]]
    ):
        frame = frame.sort("observed_at")
        hours = np.array(
            [(t - start).total_seconds() / 3600.0 for t in frame["observed_at"].to_list()]
        )
        price = frame["spot_usd_h"].to_numpy()
        before = np.flatnonzero(hours <= 0.0)
        if before.size and hours.size > before.size:
            first = int(before[-1])
            found.append((hours[first:], price[first:] / price[first]))
    return found

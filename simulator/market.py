"""Synthetic spot prices and stock over days, drawn from processes fitted to real traces.

Prices of one offer jump at exponential intervals; the logarithm of its price over the offer's own
follows an autoregressive step with errors drawn from the fitted quantiles. Stock of one kind of
node in one domain is a Markov chain over levels, a step every few minutes. Nothing here is a price
or a stock that was seen: `market_fit.json` says what was fitted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.perf.grids import Floats
from planner.types import Market, Offer
from simulator.errors import SimulationError

BELOW_ON_DEMAND = 0.99  # a spot price never reaches its on-demand price
Kind = tuple[str, str]  # domain, instance type


@dataclass(frozen=True)
class MarketFit:
    """Numbers fitted to real traces (`python -m bench.market_fit`)."""

    price_changes_per_day: float
    price_memory: float  # factor of the log price from one change to the next
    price_errors: Sequence[float]  # quantiles of the errors, evenly from 0 to 1
    stock_minutes: float  # of one step of the chain
    stock_steps: Mapping[int, Mapping[int, float]]  # level -> level -> probability
    source: str

    @classmethod
    def of(cls, text: str) -> MarketFit:
        """From JSON. Raises SimulationError: something is missing."""
        try:
            raw = json.loads(text)
            steps = {
                int(level): {int(to): float(p) for to, p in found.items()}
                for level, found in raw.pop("stock_steps").items()
            }
            return cls(**raw, stock_steps=steps)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SimulationError(f"a market fit that cannot be read: {error}") from error

    @cached_property
    def transitions(self) -> Floats:
        """Cumulated step probabilities, shape (levels, levels)."""
        count = max(max(self.stock_steps), *(max(to) for to in self.stock_steps.values())) + 1
        matrix = np.eye(count)  # a level nobody saw is not left
        for level, found in self.stock_steps.items():
            matrix[level] = 0.0
            for to, probability in found.items():
                matrix[level, to] = probability
        cumulated: Floats = np.cumsum(matrix / matrix.sum(axis=1, keepdims=True), axis=1)
        return cumulated

    @cached_property
    def mean_share(self) -> float:
        """Of the top level, over a long time."""
        steps = np.diff(self.transitions, axis=1, prepend=0.0)
        weights = np.full(len(steps), 1.0 / len(steps))
        for _ in range(20_000):
            weights = weights @ steps
        return float(weights @ np.arange(len(steps))) / (len(steps) - 1)


@dataclass(frozen=True)
class SyntheticMarket:
    """One draw of prices and spot stock for the offers of a scenario."""

    offers: tuple[Offer, ...]
    hours: float
    prices: Mapping[Kind, tuple[Floats, Floats]]  # hours of the changes, prices over the offer's
    stock: Mapping[Kind, Floats]  # share of its mean, by step
    step_hours: float

    @classmethod
    def draw(
        cls, fit: MarketFit, offers: Sequence[Offer], hours: float, seed: int
    ) -> SyntheticMarket:
        """Equal arguments give equal markets; an offer's path does not depend on the others."""
        kinds = sorted({(o.domain, o.instance_type) for o in offers if o.market is Market.SPOT})
        prices, stock = {}, {}
        for kind in kinds:
            rng = np.random.default_rng([seed, *"/".join(kind).encode()])
            prices[kind] = _prices(fit, hours, rng)
            stock[kind] = _stock(fit, hours, rng)
        return cls(tuple(offers), hours, prices, stock, fit.stock_minutes / 60.0)

    def at(self, hours: float) -> tuple[Offer, ...]:
        """The offers at some time: spot prices and spot stock as drawn, the others as they are."""
        on_demand = {
            (o.domain, o.instance_type): o.price_usd_per_hour
            for o in self.offers
            if o.market is Market.ON_DEMAND
        }
        found = []
        for offer in self.offers:
            kind = (offer.domain, offer.instance_type)
            if offer.market is Market.SPOT:
                times, ratios = self.prices[kind]
                ratio = float(ratios[int(np.searchsorted(times, hours, side="right")) - 1])
                price = min(
                    offer.price_usd_per_hour * ratio,
                    BELOW_ON_DEMAND * on_demand.get(kind, math.inf),
                )
                offer = _with(offer, price, self.spot_stock(offer, hours))
            found.append(offer)
        return tuple(found)

    def spot_stock(self, offer: Offer, hours: float) -> int:
        """Nodes of a spot offer that can be had at some time."""
        path = self.stock[offer.domain, offer.instance_type]
        return round(offer.stock * float(path[min(int(hours / self.step_hours), path.size - 1)]))

    def steps(self, begin_hours: float, end_hours: float) -> list[float]:
        """Times at which stock may change, in hours; those after `begin` up to `end`."""
        first = math.floor(begin_hours / self.step_hours + 1e-9) + 1
        last = math.floor(end_hours / self.step_hours + 1e-9)
        return [self.step_hours * k for k in range(first, last + 1)]


def _with(offer: Offer, price: float, stock: int) -> Offer:
    return Offer(
        offer.domain, offer.instance_type, offer.node_class, offer.market, price, stock,
        "synthetic", offer.zone, offer.gpus, offer.vcpus,
    )  # fmt: skip


def _prices(fit: MarketFit, hours: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    times, logs = [0.0], [0.0]
    quantiles = np.linspace(0.0, 1.0, len(fit.price_errors))
    while True:
        at = times[-1] + 24.0 * float(rng.exponential(1.0 / fit.price_changes_per_day))
        if at > hours:
            return np.array(times), np.exp(np.array(logs))
        error = float(np.interp(rng.random(), quantiles, fit.price_errors))
        times.append(at)
        logs.append(fit.price_memory * logs[-1] + error)


def _stock(fit: MarketFit, hours: float, rng: np.random.Generator) -> Floats:
    """From a level drawn at the chain's long run: it first runs for a day unseen."""
    top = len(fit.transitions) - 1
    before = round(24.0 * 60.0 / fit.stock_minutes)
    count = before + math.ceil(hours * 60.0 / fit.stock_minutes) + 1
    level, path = top, np.zeros(count)
    for k, chance in enumerate(rng.random(count)):
        level = min(int(np.searchsorted(fit.transitions[level], chance, side="right")), top)
        path[k] = level
    shares: Floats = path[before:] / top / fit.mean_share
    return shares

"""Demand to plan for: a quantile of what may come while new nodes start, from what came before.

A plan made now must serve until the nodes of the next one could be ready. Rates are forecast as a
level, the largest of the last few windows, times a factor: the quantile of what rates were, over
the horizon, relative to the level before. Two samples of such ratios are taken, the last day's
and those of the same time of day on the days before, and the larger quantile counts. Only the past
is looked at, so the forecast can be tested on any history (`coverage`).
Source: docs/formulation.md, section 5.5 (empirical quantiles of forecast errors, as in conformal
prediction: Vovk, Gammerman and Shafer 2005).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import InputError
from planner.perf.grids import Floats

DAY_MINUTES = 24 * 60
LEVEL_WINDOWS = 3  # the level is the largest rate of so many
AROUND_MINUTES = 60  # of the same time on earlier days
LONGEST_DAYS = 7  # of earlier days looked at
LEAST_RATIOS = 12  # of a quantile worth its name
LEAST_LEVEL = 0.01  # of the mean rate: after an outage ratios to nothing say nothing


class DemandError(InputError):
    """A demand history that no forecast can be made from."""


@dataclass(frozen=True)
class DemandHistory:
    """Requests/s of one stream in windows of equal length, oldest first, without gaps."""

    name: str
    window_minutes: float
    rates_rps: Floats  # shape (windows,)

    def __post_init__(self) -> None:
        rates = self.rates_rps
        wrong = np.flatnonzero(~(np.isfinite(rates) & (rates >= 0.0)))
        if wrong.size:
            raise DemandError(
                f"demand history {self.name!r}: window {wrong[0]} has {rates[wrong[0]]} "
                "requests/s; rates must be numbers from 0 up"
            )
        if not (math.isfinite(self.window_minutes) and self.window_minutes > 0):
            raise DemandError(
                f"demand history {self.name!r}: a window must last, got {self.window_minutes} "
                "minutes"
            )

    @classmethod
    def of(
        cls, name: str, window_minutes: float, rates_rps: Sequence[float], span_minutes: float
    ) -> DemandHistory:
        """From windows that span so many minutes from the first's start to the last's end.

        Raises DemandError: windows that are missing or there twice.
        """
        if abs(span_minutes - window_minutes * len(rates_rps)) > 1e-6 * max(1.0, span_minutes):
            raise DemandError(
                f"demand history {name!r} has gaps or repeats: {len(rates_rps)} windows of "
                f"{window_minutes:g} minutes in {span_minutes:g} minutes; fill them first"
            )
        return cls(name, window_minutes, np.array(rates_rps, dtype=float))

    @classmethod
    def of_minutes(
        cls, name: str, minutes: Sequence[int], rates_rps: Sequence[float]
    ) -> DemandHistory:
        """From minutes that were seen, oldest first; one that nobody saw is as the one before."""
        every = np.arange(minutes[0], minutes[-1] + 1)
        latest = np.searchsorted(np.asarray(minutes), every, side="right") - 1
        return cls(name, 1.0, np.asarray(rates_rps, dtype=float)[latest])

    def until(self, windows: int) -> DemandHistory:
        """What was known after so many windows."""
        return DemandHistory(self.name, self.window_minutes, self.rates_rps[:windows])


@dataclass(frozen=True, slots=True)
class DemandForecast:
    """What to plan for, and how it comes about: level x the larger of the two ratios."""

    rate_rps: float
    level_rps: float
    recent_ratio: float
    seasonal_ratio: float | None  # None: the history has no earlier day


def forecast_demand(
    history: DemandHistory, horizon_minutes: float, quantile: float = 0.95
) -> DemandForecast:
    """The rate that no window of the horizon exceeds with the probability `quantile`.

    Raises DemandError: the history is too short for the horizon.
    """
    horizon = horizon_windows(history, horizon_minutes)
    rates = history.rates_rps
    least = least_windows(history, horizon_minutes)
    if rates.size < least:
        raise DemandError(
            f"demand history {history.name!r} has {rates.size} windows of "
            f"{history.window_minutes:g} minutes; a forecast over {horizon_minutes:g} minutes "
            f"needs at least {least}; give requests_per_s until then"
        )
    levels = _levels(rates)
    day = max(1, round(DAY_MINUTES / history.window_minutes))
    now = rates.size - 1
    recent = float(np.quantile(_ratios(rates, levels, max(0, now - day), now, horizon), quantile))
    around = round(AROUND_MINUTES / history.window_minutes)
    earlier = [
        _ratios(rates, levels, max(0, now - k * day - around), now - k * day + around + 1, horizon)
        for k in range(1, LONGEST_DAYS + 1)
        if now - k * day >= 0
    ]
    samples = np.concatenate(earlier) if earlier else np.zeros(0)
    seasonal = float(np.quantile(samples, quantile)) if samples.size >= LEAST_RATIOS else None
    level = float(levels[now])
    ratio = max(recent, seasonal) if seasonal is not None else recent
    return DemandForecast(level * ratio, level, recent, seasonal)


def least_windows(history: DemandHistory, horizon_minutes: float) -> int:
    """So many a forecast needs."""
    return horizon_windows(history, horizon_minutes) + LEAST_RATIOS


def first_demand(rates_rps: Sequence[float], at_first_rps: float) -> DemandForecast:
    """While too few windows were seen for a forecast: the most seen, or what was expected."""
    rate = max(at_first_rps, *rates_rps, 0.0)
    return DemandForecast(rate, rate, 1.0, None)


def horizon_windows(history: DemandHistory, horizon_minutes: float) -> int:
    """Windows until the nodes of the next plan could serve."""
    return max(1, math.ceil(horizon_minutes / history.window_minutes - 1e-9))


def _levels(rates: Floats) -> Floats:
    """The largest rate of the last few windows, of every window."""
    padded = np.concatenate([np.full(LEVEL_WINDOWS - 1, rates[0]), rates])
    largest = np.lib.stride_tricks.sliding_window_view(padded, LEVEL_WINDOWS).max(axis=1)
    floor = LEAST_LEVEL * float(rates.mean())
    levels: Floats = np.maximum(largest, floor if floor > 0.0 else 1.0)
    return levels


def _ratios(rates: Floats, levels: Floats, first: int, last: int, horizon: int) -> Floats:
    """Rates over the horizon relative to the level before, of levels from `first` to `last` - 1.

    Only rates that are known: for the newest levels not yet the whole horizon.
    """
    found = []
    for lead in range(1, horizon + 1):
        end = min(last, rates.size - lead)
        if end > first:
            found.append(rates[first + lead : end + lead] / levels[first:end])
    return np.concatenate(found) if found else np.zeros(0)


@dataclass(frozen=True, slots=True)
class Coverage:
    """A forecast against what came, over a history."""

    windows: int
    covered: float  # share of windows whose rate the plan made before them would have served
    planned_over_served: float  # planned requests over those that came
    unserved_share: float  # of all requests


def coverage(
    history: DemandHistory,
    horizon_minutes: float,
    quantile: float = 0.95,
    *,
    first_window: int,
    every: int = 1,
) -> Coverage:
    """Forecast after every window from `first_window` on and compare with the windows after it."""

    def planned(known: int) -> float:
        return forecast_demand(history.until(known), horizon_minutes, quantile).rate_rps

    return coverage_of(planned, history, horizon_minutes, first_window=first_window, every=every)


def coverage_of(
    rate_after: Callable[[int], float],
    history: DemandHistory,
    horizon_minutes: float,
    *,
    first_window: int,
    every: int = 1,
) -> Coverage:
    """The same of any rule: `rate_after` so many known windows, in requests/s."""
    horizon, rates = horizon_windows(history, horizon_minutes), history.rates_rps
    covered: list[float] = []
    planned = came = unserved = 0.0
    for known in range(first_window, rates.size - horizon + 1, every):
        rate = rate_after(known)
        actual = rates[known : known + horizon]
        covered.append(float((actual <= rate * (1 + 1e-9)).mean()))
        planned += rate * horizon
        came += float(actual.sum())
        unserved += float(np.maximum(actual - rate, 0.0).sum())
    return Coverage(
        len(covered),
        float(np.mean(covered)),
        planned / came if came else math.inf,
        unserved / came if came else 0.0,
    )

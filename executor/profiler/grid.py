"""An adaptive grid: coarse at first, finer only where straight lines between points miss.

The planner interpolates linearly between the knots of a rectangular grid (planner/perf/grids.py).
So a gap between two knots is tested at its middle, at the least and the most of the other axis: a
middle that interpolation misses by more than `within` (and by more than its noise) becomes a knot.
The gap that is missed by most goes first; what is left when time is up is said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

WITHIN = 0.03
LEAST_RATIO = 1.5  # between neighbours


class TooLargeError(Exception):
    """A point that the memory does not hold."""


@dataclass(frozen=True)
class Time:
    """Of one point: milliseconds, and what of it may be noise."""

    ms: float
    error_ms: float = 0.0


@dataclass
class Found:
    """A finished grid."""

    xs: list[int]
    ys: list[int]
    checks: list[dict[str, float]] = field(default_factory=list)  # middles that were tested
    open_gaps: int = 0  # not tested before the time was up
    notes: list[str] = field(default_factory=list)


Measure = Callable[[int, int], Time]


class Grid:
    """Points of two axes, x and y, each from its least to its largest value."""

    def __init__(
        self, xs: list[int], ys: list[int], measure: Measure, has_time: Callable[[], bool],
        within: float = WITHIN,
    ) -> None:  # fmt: skip
        self.found = Found(sorted(set(xs)), sorted(set(ys)))
        self._measure, self._has_time, self._within = measure, has_time, within
        self._times: dict[tuple[int, int], Time] = {}

    def run(self) -> Found:
        """Measure the coarse grid, then refine it while there is time."""
        self._fill()
        gaps = self._gaps()
        while gaps:
            if not self._has_time():
                self.found.open_gaps = len(gaps)
                break
            _, axis, low, high = gaps.pop(0)
            missed = self._test(axis, low, high)
            if missed is not None:
                middle = _middle(low, high)
                gaps += [(missed, axis, low, middle), (missed, axis, middle, high)]
                gaps = sorted((gap for gap in gaps if _middle(*gap[2:])), reverse=True)
        return self.found

    def _fill(self) -> None:
        """Every crossing, from small to large; a grid that memory does not hold gets smaller."""
        for x in list(self.found.xs):
            for y in list(self.found.ys):
                if x in self.found.xs and y in self.found.ys:
                    try:
                        self._at(x, y)
                    except TooLargeError as error:
                        self._shrink(x, y, str(error))

    def _shrink(self, x: int, y: int, why: str) -> None:
        xs, ys = self.found.xs, self.found.ys
        if x > xs[0]:
            self.found.xs = [kept for kept in xs if kept < x]
            what = f"x up to {self.found.xs[-1]} instead of {xs[-1]}"
        elif y > ys[0]:
            self.found.ys = [kept for kept in ys if kept < y]
            what = f"y up to {self.found.ys[-1]} instead of {ys[-1]}"
        else:
            raise TooLargeError(f"not even the smallest point fits: {why}")
        self.found.notes.append(f"the grid shrinks to {what}: {why}")

    def _gaps(self) -> list[tuple[float, int, int, int]]:
        found = [
            (math.inf, axis, low, high)
            for axis, knots in enumerate((self.found.xs, self.found.ys))
            for low, high in itertools.pairwise(knots)
            if _middle(low, high)
        ]
        return sorted(found, key=lambda gap: -gap[3] / max(1, gap[2]))

    def _test(self, axis: int, low: int, high: int) -> float | None:
        """By how much the middle was missed, where it became a knot."""
        middle = _middle(low, high)
        others = self.found.ys if axis == 0 else self.found.xs
        worst, noise = 0.0, 0.0
        for other in dict.fromkeys((others[-1], others[0])):
            before, after = self._on(axis, low, other), self._on(axis, high, other)
            real = self._on(axis, middle, other)
            share = (middle - low) / (high - low)
            guess = before.ms + share * (after.ms - before.ms)
            miss = abs(guess / real.ms - 1.0)
            errors = (before.error_ms, after.error_ms, real.error_ms)
            if miss >= worst:
                worst, noise = miss, 2.0 * math.sqrt(sum(e * e for e in errors)) / real.ms
        self.found.checks.append(
            {"axis": axis, "at": middle, "miss": round(worst, 4), "noise": round(noise, 4)}
        )
        if worst <= max(self._within, noise):
            return None
        return worst if self._add(axis, middle) else None

    def _add(self, axis: int, middle: int) -> bool:
        """Make it a knot, if all its crossings can be measured in time."""
        knots, others = (
            (self.found.xs, self.found.ys) if axis == 0 else (self.found.ys, self.found.xs)
        )
        for other in others:
            if not self._has_time():
                self.found.open_gaps += 1
                return False
            self._on(axis, middle, other)
        knots.append(middle)
        knots.sort()
        return True

    def _on(self, axis: int, value: int, other: int) -> Time:
        return self._at(value, other) if axis == 0 else self._at(other, value)

    def _at(self, x: int, y: int) -> Time:
        if (x, y) not in self._times:
            self._times[x, y] = self._measure(x, y)
        return self._times[x, y]


def _middle(low: int, high: int) -> int:
    """Where to test a gap; 0 where it is narrow enough."""
    middle = round(math.sqrt(low * high)) if low else high // 2
    narrow = low and high < LEAST_RATIO * LEAST_RATIO * low
    return 0 if narrow or middle in {low, high} else middle

"""Monotone piecewise-linear interpolation: more work never takes less time.

Below its first knot a table answers the first knot's time (small work is never free); above its
last one it goes on with the slope of its end segment up to `REACH` times the last knot, and
answers infinity beyond, where nobody measured anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
REACH = 16.0


@dataclass(frozen=True, slots=True)
class Line:
    """y(x), non-decreasing."""

    x: Floats  # strictly increasing, shape (n,)
    y: Floats  # non-decreasing, shape (n,)

    @classmethod
    def of(cls, x: Sequence[float], y: Sequence[float]) -> Line:
        """Sort by x, take the larger of duplicates, and lift y to its running maximum."""
        surface = Surface.of(x, [0.0] * len(x), y)
        return cls(surface.x, surface.z[:, 0])

    def __call__(self, x: ArrayLike) -> Floats:
        left, fraction = _locate(self.x, np.asarray(x, dtype=float))
        right = np.minimum(left + 1, self.x.size - 1)
        value = self.y[left] + fraction * (self.y[right] - self.y[left])
        return np.where(np.asarray(x, dtype=float) > self.x[-1], np.inf, value)


@dataclass(frozen=True, slots=True)
class Surface:
    """z(x, y), non-decreasing in both, bilinear inside its grid."""

    x: Floats  # strictly increasing, shape (n,)
    y: Floats  # strictly increasing, shape (m,)
    z: Floats  # non-decreasing along both axes, shape (n, m)

    @classmethod
    def of(cls, x: Sequence[float], y: Sequence[float], z: Sequence[float]) -> Surface:
        """From points that fill a grid; z is lifted to its running maximum along both axes.

        Raises ValueError: a cell of the grid has no point.
        """
        xs, i = np.unique(np.asarray(x, dtype=float), return_inverse=True)
        ys, j = np.unique(np.asarray(y, dtype=float), return_inverse=True)
        zs = np.full((xs.size, ys.size), -np.inf)
        np.maximum.at(zs, (i, j), np.asarray(z, dtype=float))
        holes = np.argwhere(np.isneginf(zs))
        if len(holes):
            first = f"({xs[holes[0][0]]:g}, {ys[holes[0][1]]:g})"
            raise ValueError(f"the table has holes: {len(holes)} points of its grid, first {first}")
        zs = _lift(zs)
        xs, zs = _extend(xs, zs)
        ys, transposed = _extend(ys, zs.T)
        return cls(xs, ys, _lift(transposed.T))

    def __call__(self, x: ArrayLike, y: ArrayLike) -> Floats:
        x_array, y_array = np.broadcast_arrays(np.asarray(x, dtype=float), np.asarray(y, float))
        i, s = _locate(self.x, x_array)
        j, t = _locate(self.y, y_array)
        i2 = np.minimum(i + 1, self.x.size - 1)
        j2 = np.minimum(j + 1, self.y.size - 1)
        low = self.z[i, j] + s * (self.z[i2, j] - self.z[i, j])
        high = self.z[i, j2] + s * (self.z[i2, j2] - self.z[i, j2])
        outside = (x_array > self.x[-1]) | (y_array > self.y[-1])
        return np.where(outside, np.inf, low + t * (high - low))


def _lift(z: Floats) -> Floats:
    """The least table above z that never decreases along either axis."""
    return np.maximum.accumulate(np.maximum.accumulate(z, axis=0), axis=1)


def _extend(knots: Floats, z: Floats) -> tuple[Floats, Floats]:
    """One far knot more along the first axis, at the slope of the end segment."""
    if knots.size == 1 or knots[-1] <= 0:
        return knots, z
    slope = (z[-1] - z[-2]) / (knots[-1] - knots[-2])
    far = REACH * knots[-1]
    return np.append(knots, far), np.vstack([z, z[-1] + slope * (far - knots[-1])])


def _locate(knots: Floats, x: Floats) -> tuple[NDArray[np.intp], Floats]:
    """Index of the segment of each x, and its fraction along it, in [0, 1]."""
    if knots.size == 1:
        return np.zeros(x.shape, dtype=np.intp), np.zeros(x.shape)
    left = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, knots.size - 2)
    fraction = (x - knots[left]) / (knots[left + 1] - knots[left])
    return left, np.clip(fraction, 0.0, 1.0)

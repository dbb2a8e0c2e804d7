"""Engine overhead per step, fitted on measured serving points per GPU family, and per model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class EnginePoint:
    """One measured serving run beside what the layer tables predict for it without overhead."""

    family: str  # compute capability, '9.0' for Hopper
    measured_tpot_ms: float
    predicted_tpot_ms: float
    model: str = ""


LEAST_POINTS = 10  # of a model on a family, for an overhead of its own


def fit_engine_overhead(points: Sequence[EnginePoint]) -> Mapping[str, float]:
    """Milliseconds to add to every step, by GPU family.

    Minimises the sum of |predicted + overhead - measured| / measured, whose minimiser is the
    median of the residuals weighted by 1 / measured; never below zero. A family without points
    has no entry: nothing is assumed for it.
    """
    families = sorted({point.family for point in points})
    return {
        family: _weighted_median([p for p in points if p.family == family]) for family in families
    }


def fit_model_overhead(points: Sequence[EnginePoint]) -> Mapping[tuple[str, str], float]:
    """The same by (family, model), of models with points enough.

    What their tables miss beyond the engine's own time is in it too.
    """
    keys = sorted({(point.family, point.model) for point in points if point.model})
    mine = {key: [p for p in points if (p.family, p.model) == key] for key in keys}
    return {
        key: _weighted_median(found) for key, found in mine.items() if len(found) >= LEAST_POINTS
    }


def _weighted_median(points: Sequence[EnginePoint]) -> float:
    residual = np.array([p.measured_tpot_ms - p.predicted_tpot_ms for p in points])
    weight = np.array([1.0 / p.measured_tpot_ms for p in points])
    order = np.argsort(residual, kind="stable")
    reached = np.cumsum(weight[order]) >= weight.sum() / 2.0
    return max(0.0, float(residual[order][int(np.argmax(reached))]))

"""Roofline factors of a GPU, fitted on whatever of its layers was measured.

    minimise  sum over models m of mean over rows of |log(roofline(row; e_c, e_b, overhead) / ms)|

over compute efficiency e_c and bandwidth efficiency e_b in (0, 1.2] and a fixed overhead per layer,
by a grid of starts and Nelder-Mead; every model counts alike, however many rows it has. `lomo`:
every model's error with factors fitted on the others.
Source: docs/formulation.md, section 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from planner.errors import MissingProfileError
from planner.perf.grids import Floats
from planner.perf.roofline import Calibration, Roofline
from planner.perf.tables import LayerRow
from planner.types import GpuSpec, ModelSpec, Provenance

LARGEST_EFFICIENCY, LARGEST_OVERHEAD_US = 1.2, 2000.0
LEAST_EFFICIENCY = 0.01

Tables = Mapping[tuple[str, int], Sequence[LayerRow]]  # (model, tensor parallel size)


@dataclass(frozen=True, slots=True)
class Fit:
    """Factors, and their errors in per cent (median over rows)."""

    calibration: Calibration
    models: tuple[str, ...]
    rows: int
    prefill_error_pct: float  # nan where there are no rows of it
    decode_error_pct: float
    lomo_error_pct: float  # nan with one model alone


def fit_roofline(gpu: GpuSpec, models: Mapping[str, ModelSpec], tables: Tables, source: str) -> Fit:
    """Fit on all rows of prefill and decode, of any shape and number.

    Raises MissingProfileError: there are none.
    """
    names = tuple(sorted({model for model, _ in tables}))
    rows = sum(len(_usable(found)) for found in tables.values())
    if not rows:
        raise MissingProfileError(f"nothing of {gpu.name} is measured; profile a model on it first")
    best = _fit(gpu, models, tables, source)
    errors = _errors(gpu, models, tables, best)
    left_out = []
    for name in names if len(names) > 1 else ():
        others = {key: found for key, found in tables.items() if key[0] != name}
        mine = {key: found for key, found in tables.items() if key[0] == name}
        by_phase = _errors(gpu, models, mine, _fit(gpu, models, others, source))
        left_out.append(float(np.median(np.concatenate(list(by_phase.values())))))
    return Fit(
        calibration=best,
        models=names,
        rows=rows,
        prefill_error_pct=_median(errors["prefill"]),
        decode_error_pct=_median(errors["decode"]),
        lomo_error_pct=float(np.mean(left_out)) if left_out else float("nan"),
    )


def _fit(gpu: GpuSpec, models: Mapping[str, ModelSpec], tables: Tables, source: str) -> Calibration:
    def loss(x: Floats) -> float:
        errors = _logs(gpu, models, tables, _calibration(x, source))
        return float(np.mean([np.mean(np.abs(found)) for found in errors]))

    starts = [np.array([c, b, o]) for c in (0.3, 0.7) for b in (0.3, 0.8) for o in (5.0, 40.0)]
    found = [
        minimize(loss, start, method="Nelder-Mead", options={"maxiter": 300, "fatol": 1e-5})
        for start in sorted(starts, key=loss)[:3]
    ]
    return _calibration(min(found, key=lambda one: float(one.fun)).x, source)


def _calibration(x: Floats, source: str) -> Calibration:
    return Calibration(
        float(np.clip(x[0], LEAST_EFFICIENCY, LARGEST_EFFICIENCY)),
        float(np.clip(x[1], LEAST_EFFICIENCY, LARGEST_EFFICIENCY)),
        float(np.clip(x[2], 0.0, LARGEST_OVERHEAD_US)),
        Provenance.CALIBRATED,
        source,
    )


def _logs(
    gpu: GpuSpec, models: Mapping[str, ModelSpec], tables: Tables, with_factors: Calibration
) -> list[Floats]:
    """log(roofline / measured), one array per model."""
    by_model: dict[str, list[Floats]] = {}
    for (name, size), rows in tables.items():
        found = _table_logs(gpu, models[name], size, rows, with_factors).values()
        by_model.setdefault(name, []).extend(f for f in found if f.size)
    return [np.concatenate(found) for found in by_model.values() if found]


def _errors(
    gpu: GpuSpec, models: Mapping[str, ModelSpec], tables: Tables, with_factors: Calibration
) -> dict[str, Floats]:
    """Per cent, by phase."""
    found: dict[str, list[Floats]] = {"prefill": [np.zeros(0)], "decode": [np.zeros(0)]}
    for (name, size), rows in tables.items():
        for phase, logs in _table_logs(gpu, models[name], size, rows, with_factors).items():
            found[phase].append(100.0 * np.abs(np.expm1(logs)))
    return {phase: np.concatenate(values) for phase, values in found.items()}


def _table_logs(
    gpu: GpuSpec, model: ModelSpec, size: int, rows: Sequence[LayerRow], factors: Calibration
) -> dict[str, Floats]:
    roofline = Roofline(model, gpu, size, factors)
    logs = {}
    for phase in ("prefill", "decode"):
        mine = [row for row in _usable(rows) if row.phase == phase]
        batch = _column([row.batch for row in mine])
        tokens = _column([row.tokens for row in mine])
        context = _column([row.context for row in mine])
        ms = _column([row.linear_ms + row.attention_ms for row in mine])
        if not mine:
            logs[phase] = np.zeros(0)
        elif phase == "decode":
            logs[phase] = np.log(roofline.decode_layer_ms(batch, context) / ms)
        else:
            attention = batch * roofline.prefill_attention_ms(tokens / batch, context)
            logs[phase] = np.log((roofline.prefill_linear_ms(tokens) + attention) / ms)
    return logs


def _column(values: Sequence[float]) -> Floats:
    return np.asarray(values, dtype=np.float64)


def _usable(rows: Sequence[LayerRow]) -> list[LayerRow]:
    return [row for row in rows if row.phase in {"prefill", "decode"}]


def _median(values: Floats) -> float:
    return float(np.median(values)) if values.size else float("nan")

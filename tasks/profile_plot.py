"""Plot of a layer table: measured points, what is interpolated between them, the roofline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from planner.errors import InputError
from planner.perf.grids import Floats
from planner.perf.model import ROOFLINE_DTYPES
from planner.perf.roofline import Calibration, Roofline, default_calibration
from planner.perf.tables import LayerRow, LayerTable
from planner.types import Provenance
from tasks.profile_catalog import TableView

STYLE: dict[Any, Any] = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
MOST_CURVES = 5


def draw_table(view: TableView, path: Path) -> None:
    """Decode over the batch, prefill over the tokens, linear work, and the whole engine.

    Raises InputError: the file cannot be written, or is of an unknown kind.
    """
    table = LayerTable.of(f"{view.model.name} on {view.gpu.name}", view.rows)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 7.0), layout="constrained")
        panels = figure.subplots(2, 2)
        _decode(panels[0][0], view, table)
        _prefill(panels[0][1], view, table)
        _linear(panels[1][0], view, table)
        _engine(panels[1][1], view)
        figure.suptitle(
            f"{view.model.short_name} {view.model.dtype} on {view.gpu.name} TP{view.tp}, "
            f"one layer\n{view.source}", fontsize=9,
        )  # fmt: skip
        try:
            figure.savefig(path, dpi=130)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot draw into {path}: {error}") from error


def _decode(axes: Axes, view: TableView, table: LayerTable) -> None:
    rows = [row for row in view.rows if row.phase == "decode"]
    contexts = _some(sorted({row.context for row in rows}))
    _, calibration = _roofline(view)
    for number, context in enumerate(contexts):
        mine = [row for row in rows if row.context == context]
        roof = _curve_of(view, calibration, float(context), decode=True)

        def interpolated(x: Floats, c: int = context) -> Floats:
            return table.decode_layer_ms(x, np.full(x.shape, float(c)))

        x = [row.batch for row in mine]
        _curve(axes, number, x, mine, f"context {context}", interpolated, roof)
    _finish(axes, "Decode", "batch (requests)")


def _prefill(axes: Axes, view: TableView, table: LayerTable) -> None:
    rows = [row for row in view.rows if row.phase == "prefill" and row.batch == 1]
    _, calibration = _roofline(view)
    for number, context in enumerate(_some(sorted({row.context for row in rows}))):
        mine = [row for row in rows if row.context == context]

        def interpolated(x: Floats, c: int = context) -> Floats:
            behind = np.full(x.shape, float(c))
            return table.prefill_linear_ms(x) + table.prefill_attention_ms(x, behind)

        roof = _curve_of(view, calibration, float(context), decode=False)
        label = f"behind {context} cached tokens"
        _curve(axes, number, [row.tokens for row in mine], mine, label, interpolated, roof)
    _finish(axes, "Prefill of one prompt", "new tokens")


def _linear(axes: Axes, view: TableView, table: LayerTable) -> None:
    """All but attention: decode, prefill and mixed steps share it."""
    for number, phase in enumerate(("decode", "prefill", "mixed")):
        mine = [row for row in view.rows if row.phase == phase]
        if not mine:
            continue
        axes.plot(
            [row.tokens for row in mine], [row.linear_ms for row in mine], "o^s"[number],
            color=f"C{number}", ms=4, label=f"{phase} (measured)", ls="none",
        )  # fmt: skip
    tokens = np.array(sorted({row.tokens for row in view.rows}), dtype=float)
    x = np.geomspace(tokens[0], tokens[-1], 200)
    axes.plot(x, table.mixed_linear_ms(x), color="0.3", lw=1, label="of a mixed step, interpolated")
    name, calibration = _roofline(view)
    roof = Roofline(view.model, view.gpu, view.tp, calibration)
    axes.plot(x, roof.mixed_linear_ms(x), color="0.3", lw=1, ls=":", label=f"roofline, {name}")
    ideal = Calibration(1.0, 1.0, 0.0, Provenance.ESTIMATED, "ideal")
    bare = Roofline(view.model, view.gpu, view.tp, ideal)
    axes.plot(x, bare.mixed_linear_ms(x), color="0.6", lw=1, ls="--", label="at the GPU's rates")
    _finish(axes, "All but attention", "tokens of a step")


def _engine(axes: Axes, view: TableView) -> None:
    axes.set_title("Whole engine: TPOT", fontsize=8, loc="left")
    if not view.engine:
        axes.text(0.5, 0.5, "never run", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    measured = [check.measured_tpot_ms for check in view.engine]
    predicted = [check.predicted_tpot_ms for check in view.engine]
    low, high = 0.8 * min(measured + predicted), 1.25 * max(measured + predicted)
    axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high],
                      color="0.9", label="within 10%")  # fmt: skip
    axes.plot([low, high], [low, high], color="0.5", lw=1)
    axes.plot(measured, predicted, "o", ms=4, label="runs")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("measured, ms")
    axes.set_ylabel(f"tables and {view.overhead_ms:.2f} ms overhead, ms")
    axes.legend(frameon=False)


def _curve(
    axes: Axes, number: int, x: Sequence[int], rows: Sequence[LayerRow], label: str,
    interpolated: Callable[[Floats], Floats], roofline: Callable[[Floats], Floats],
) -> None:  # fmt: skip
    color = f"C{number}"
    axes.plot(x, [row.linear_ms + row.attention_ms for row in rows], "o", ms=4, color=color,
              label=label)  # fmt: skip
    dense = np.geomspace(min(x), max(x), 200) if len(x) > 1 else np.array([float(x[0])])
    axes.plot(dense, interpolated(dense), color=color, lw=1)
    axes.plot(dense, roofline(dense), color=color, lw=1, ls=":")


def _curve_of(
    view: TableView, calibration: Calibration, context: float, decode: bool
) -> Callable[[Floats], Floats]:
    roof = Roofline(view.model, view.gpu, view.tp, calibration)

    def ms(x: Floats) -> Floats:
        behind = np.full(x.shape, context)
        if decode:
            return roof.decode_layer_ms(x, behind)
        return roof.prefill_linear_ms(x) + roof.prefill_attention_ms(x, behind)

    return ms


def _roofline(view: TableView) -> tuple[str, Calibration]:
    """Calibrated where the GPU is, else with the class default."""
    scope = "moe" if view.model.is_moe else "dense"
    names = ROOFLINE_DTYPES.get(view.model.dtype, (view.model.dtype,))
    for dtype in names:
        found = view.performance.calibrations.get((view.gpu.profile_name, scope, dtype))
        if found is not None:
            return "calibrated", found
    return "class default", default_calibration(view.model, view.gpu)


def _some(values: Sequence[int]) -> list[int]:
    """The first, the last, and some between."""
    if len(values) <= MOST_CURVES:
        return list(values)
    places = np.linspace(0, len(values) - 1, MOST_CURVES).round().astype(int)
    return [values[place] for place in places]


def _finish(axes: Axes, title: str, x: str) -> None:
    axes.set_title(f"{title} (points measured, lines interpolated, dotted roofline)", fontsize=8,
                   loc="left")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(x)
    axes.set_ylabel("ms")
    axes.grid(lw=0.3)
    axes.legend(frameon=False)

"""Plots of a comparison: bars of one case, curves of a sweep, marks over a suite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from planner.engine import Engine
from tasks.comparison_view import CORAL, TITLES, Line

STYLE: dict[Any, Any] = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
MARKS = "osD^vP<>X*p"


def draw_lines(lines: Sequence[Line], title: str, path: Path) -> None:
    """Cost and served share of every planner, a pair of panels per engine."""
    engines = list(dict.fromkeys(line.engine for line in lines))
    cases = list(dict.fromkeys(line.case for line in lines))
    with mpl.rc_context(STYLE):
        if len(cases) == 1:
            figure = _one_case(lines, engines)
        else:
            numeric = all(line.group.replace(".", "", 1).isdigit() for line in lines)
            figure = _sweep(lines, engines) if numeric else _suite(lines, engines, cases)
        figure.suptitle(f"{title[0].upper()}{title[1:]}", fontsize=9)
        figure.savefig(path, dpi=130)


def _one_case(lines: Sequence[Line], engines: Sequence[Engine]) -> Figure:
    """Horizontal bars with their values: engines are rows."""
    names = _planners(lines)
    size = (8.0, len(engines) * (0.24 * len(names) + 0.9) + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    rows = figure.subplots(len(engines), 2, sharex="col", squeeze=False)
    for (cost, served), engine in zip(rows, engines, strict=True):
        found = {line.planner: line for line in lines if line.engine is engine}
        mine = [found[name] for name in names if name in found]
        places = [len(names) - names.index(line.planner) for line in mine]
        colors = ["C0" if line.planner == CORAL else "0.65" for line in mine]
        bars = cost.barh(places, [line.usd_per_hour for line in mine], color=colors)
        for bar, line in zip(bars, mine, strict=True):
            bar.set_alpha(1.0 if line.served_all else 0.4)
        cost.bar_label(bars, [f"{line.usd_per_hour:.2f}" for line in mine], padding=2)
        bars = served.barh(places, [100.0 * line.served_share for line in mine], color=colors)
        served.bar_label(bars, [_percent(line.served_share) for line in mine], padding=2)
        cost.set_yticks(places, [line.planner for line in mine])
        served.set_yticks(places, [])
        cost.set_title(TITLES[engine], fontsize=8, loc="left")
        cost.margins(x=0.12)
        served.margins(x=0.12)
    cost.set_xlabel("USD/hour (pale: not all is served)")
    served.set_xlabel("requests served, %")
    return figure


def _sweep(lines: Sequence[Line], engines: Sequence[Engine]) -> Figure:
    """Curves over the values swept; hollow marks where not all is served."""
    names = _planners(lines)
    figure = Figure(figsize=(9.5, 3.2 * len(engines) + 0.9), layout="constrained")
    rows = figure.subplots(len(engines), 2, sharex=True, squeeze=False)
    for (cost, served), engine in zip(rows, engines, strict=True):
        for name in names:
            mine = [ln for ln in lines if ln.engine is engine and ln.planner == name]
            mine.sort(key=lambda line: float(line.group))
            at = [float(line.group) for line in mine]
            look = _look(names, name)
            for axes, values in (
                (cost, [line.usd_per_hour or math.nan for line in mine]),  # nothing is rented
                (served, [100.0 * line.served_share for line in mine]),
            ):
                axes.plot(at, values, color=look["color"], lw=2.0 if name == CORAL else 1.0)
                for x, y, line in zip(at, values, mine, strict=True):
                    fill = look["color"] if line.served_all else "white"
                    axes.plot(x, y, look["marker"], mec=look["color"], mfc=fill, ms=5)
        for axes in (cost, served):
            _value_ticks(axes, sorted({float(line.group) for line in lines}))
        cost.set_ylim(bottom=0.0)
        served.set_ylim(0.0, 105.0)
        cost.set_ylabel("USD/hour (hollow: not all is served)")
        served.set_ylabel("requests served, %")
        cost.set_title(TITLES[engine], fontsize=8, loc="left")
    for axes in rows[-1]:
        what = lines[-1].case.replace(lines[-1].group, "").strip()
        axes.set_xlabel(what.replace(" x", ", times the scenario's"))
    _legend(figure, names)
    return figure


def _suite(lines: Sequence[Line], engines: Sequence[Engine], cases: Sequence[str]) -> Figure:
    """Marks per case: cost over Coral's where both serve everything, and what is served."""
    names = _planners(lines)
    size = (max(8.5, 0.45 * len(cases) + 2.0), 4.6 * len(engines) + 1.4)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(2 * len(engines), 1, sharex=True)
    by_key = {(line.engine, line.case, line.planner): line for line in lines}
    for number, engine in enumerate(engines):
        cost, served = panels[2 * number : 2 * number + 2]
        cost.axhline(1.0, color="C0", lw=1.0)
        for name in names:
            look = _look(names, name)
            shift = ((names.index(name) + 0.5) / len(names) - 0.5) * 0.6
            for place, case in enumerate(cases):
                line = by_key.get((engine, case, name))
                coral = by_key[engine, case, CORAL]
                if line is None:
                    continue
                served.plot(place + shift, 100.0 * line.served_share, ms=4, **look)
                if line.served_all and coral.served_all and coral.usd_per_hour > 0:
                    ratio = line.usd_per_hour / coral.usd_per_hour
                    cost.plot(place + shift, ratio, ms=4, **look)
        cost.set_ylabel("cost over Coral's\n(where both serve all)")
        served.set_ylabel("requests served, %")
        served.set_ylim(0.0, 105.0)
        cost.set_title(TITLES[engine], fontsize=8, loc="left")
        for axes in (cost, served):
            axes.grid(axis="y", lw=0.3)
    panels[-1].set_xticks(range(len(cases)), cases, rotation=40, ha="right")
    _legend(figure, names)
    return figure


def _planners(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line.planner for line in lines))


def _look(names: Sequence[str], name: str) -> dict[str, Any]:
    number = names.index(name)
    color = mpl.colormaps["tab20" if len(names) > 10 else "tab10"](number)
    return {
        "color": mpl.colors.to_hex(color),
        "marker": MARKS[number % len(MARKS)],
        "linestyle": "none",
    }


def _legend(figure: Figure, names: Sequence[str]) -> None:
    handles = [Line2D([], [], label=name, **_look(names, name)) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(names)),
                  frameon=False)  # fmt: skip


def _value_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Values that double stand at equal distances."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def _percent(share: float) -> str:
    return "all" if share >= 1.0 - 5e-5 else f"{100.0 * share:.1f}"

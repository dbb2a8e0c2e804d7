"""Plots of the dashboard. Their text is grey that reads on white and on near-black alike."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl

from tasks.page import BASELINE, MIXED, PURE

# Okabe-Ito, without black and yellow, which one of the two backgrounds swallows.
COLOURS = (PURE, MIXED, "#009E73", "#CC79A7", "#56B4E9", "#E69F00", BASELINE)
GREY = "#7d8590"


def over_time(frame: pl.DataFrame, x: str, y: str, by: str, unit: str) -> go.Figure:
    """Steps: what was planned or priced stays until the next."""
    figure = _figure(unit)
    for number, (name, part) in enumerate(_groups(frame, by)):
        figure.add_scatter(
            x=part[x].to_list(), y=part[y].to_list(), name=name, mode="lines+markers",
            line={"shape": "hv", "width": 2, "color": COLOURS[number % len(COLOURS)]},
            marker={"size": 4},
        )  # fmt: skip
    return figure


def stacked_steps(frame: pl.DataFrame, x: str, y: str, by: str, unit: str) -> go.Figure:
    """The same, one on the other."""
    figure = _figure(unit)
    times = frame[x].unique().sort()
    for number, (name, part) in enumerate(_groups(frame, by)):
        whole = pl.DataFrame({x: times}).join(part.select(x, y), on=x, how="left")
        figure.add_scatter(
            x=times.to_list(), y=whole[y].fill_null(0.0).to_list(), name=name, mode="lines",
            stackgroup="one",
            line={"shape": "hv", "width": 1, "color": COLOURS[number % len(COLOURS)]},
        )  # fmt: skip
    return figure


def bars(frame: pl.DataFrame, x: str, y: str, by: str, unit: str) -> go.Figure:
    """Stacked bars."""
    figure = _figure(unit)
    figure.update_layout(barmode="stack")
    for number, (name, part) in enumerate(_groups(frame, by)):
        figure.add_bar(
            x=[str(value) for value in part[x].to_list()], y=part[y].to_list(), name=name,
            marker_color=COLOURS[number % len(COLOURS)],
        )  # fmt: skip
    return figure


def points(
    frame: pl.DataFrame, x: str, y: str, text: str, by: str, units: Sequence[str]
) -> go.Figure:
    """A dot per row, with what it is under the pointer."""
    figure = _figure(units[1])
    figure.update_xaxes(title=units[0], type="log")
    for number, (name, part) in enumerate(_groups(frame, by)):
        figure.add_scatter(
            x=part[x].to_list(), y=part[y].to_list(), text=part[text].to_list(), name=name,
            mode="markers", marker={"size": 7, "color": COLOURS[number % len(COLOURS)]},
            hovertemplate="%{text}<br>%{x:.3g} " + units[0] + ", %{y:.4g} " + units[1],
        )  # fmt: skip
    return figure


def _groups(frame: pl.DataFrame, by: str) -> list[tuple[str, pl.DataFrame]]:
    return [(str(name), frame.filter(pl.col(by) == name)) for name in sorted(frame[by].unique())]


def _figure(unit: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", height=320,
        margin={"l": 8, "r": 8, "t": 8, "b": 8}, font={"color": GREY, "size": 13},
        legend={"orientation": "h", "y": -0.18, "yanchor": "top"}, hovermode="closest",
        showlegend=True,
    )  # fmt: skip
    line = {"gridcolor": "rgba(125,133,144,0.25)", "zerolinecolor": "rgba(125,133,144,0.5)"}
    figure.update_xaxes(automargin=True, **line)
    figure.update_yaxes(automargin=True, rangemode="tozero", title=unit, **line)
    return figure

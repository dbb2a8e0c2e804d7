"""The page of a simulation: latencies against objectives, attainment over time, utilisation."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from planner.perf.grids import Floats
from simulator.measures import tpot_ms, ttft_ms
from simulator.run import Status
from tasks.page import BASELINE, MIXED, PURE, WIDE_IN, svg, write_page

if TYPE_CHECKING:
    from tasks.simulation import Simulation

MOST_POINTS = 400  # of a curve
BINS = 40  # over the trace's time
CURVES = (PURE, MIXED, "#009E73", "#CC79A7", "#56B4E9", "#E69F00", BASELINE, "#000000")


def write_simulation_page(path: Path, found: Simulation, made_at: datetime) -> None:
    """Write the page, whole or not at all."""
    write_page(
        path,
        "simulation.html",
        found=found,
        made_at=made_at.isoformat(timespec="minutes"),
        latency_chart=svg(_latency_figure(found)),
        time_chart=svg(_time_figure(found)),
        lane_chart=svg(_lane_figure(found)),
    )


def _latency_figure(found: Simulation) -> Figure:
    """Share of requests within a latency, over the objective: one is met left of 1."""
    result, names = found.result, found.result.trace.workloads
    figure = Figure(figsize=(WIDE_IN, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    done = result.status == Status.DONE
    for axes, title, values in (
        (panels[0], "time to first token", ttft_ms(result)),
        (panels[1], "time per output token", tpot_ms(result)),
    ):
        for k, name in enumerate(names):
            mine = done & (result.trace.workload == k)
            mine &= (result.trace.output_tokens > 1) | (title == "time to first token")
            slo = found.slos[name]
            objective = slo.ttft_ms if title == "time to first token" else slo.tpot_ms
            _curve(axes, values[mine] / objective, CURVES[k % len(CURVES)], name)
        axes.axvline(1.0, color=BASELINE, lw=0.8, ls="--")
        axes.set_xscale("log")
        axes.set_xticks(
            [0.01, 0.1, 0.25, 0.5, 1.0, 2.0, 10.0], ["0.01", "0.1", "", "0.5", "1", "2", "10"]
        )
        axes.minorticks_off()
        axes.set_xlim(max(axes.get_xlim()[0], 0.01), max(axes.get_xlim()[1], 1.3))
        axes.set_xlabel(f"{title} / objective")
        axes.set_ylim(0.0, 1.02)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("share of requests")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    return figure


def _curve(axes: Any, values: Floats, colour: str, name: str) -> None:
    ordered = np.sort(np.maximum(values, 1e-3))
    if not ordered.size:
        axes.plot([], [], color=colour, label=name)
        return
    at = np.unique(np.linspace(0, ordered.size - 1, MOST_POINTS).astype(int))
    axes.plot(ordered[at], (at + 1) / ordered.size, color=colour, lw=1.4, label=name)


def _time_figure(found: Simulation) -> Figure:
    """Attainment of what came in each part of the trace's time."""
    result, trace = found.result, found.result.trace
    figure = Figure(figsize=(WIDE_IN, 2.6), layout="constrained")
    axes = figure.subplots()
    edges = np.linspace(0.0, max(trace.duration_s, 1e-9), BINS + 1)
    middle = (edges[1:] + edges[:-1]) / 120.0
    place = np.clip(np.searchsorted(edges, trace.arrival_s, side="right") - 1, 0, BINS - 1)
    done, ttft, tpot = result.status == Status.DONE, ttft_ms(result), tpot_ms(result)
    for k, name in enumerate(trace.workloads):
        slo, mine = found.slos[name], trace.workload == k
        good = mine & done & (ttft <= slo.ttft_ms) & (tpot <= slo.tpot_ms)
        came = np.bincount(place[mine], minlength=BINS)
        met = np.bincount(place[good], minlength=BINS)
        some = came > 0
        axes.plot(
            middle[some], 100.0 * met[some] / came[some], color=CURVES[k % len(CURVES)], lw=1.2
        )
    axes.set_ylim(0.0, 102.0)
    axes.set_xlabel("minutes")
    axes.set_ylabel("met both objectives, %")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _lane_figure(found: Simulation) -> Figure:
    """Utilisation of every tensor parallel group, by node class."""
    shares: dict[str, list[float]] = defaultdict(list)
    for lane in found.lanes:
        shares[lane.node_class].append(100.0 * lane.utilization)
    names = sorted(shares)
    figure = Figure(figsize=(WIDE_IN, 0.3 * len(names) + 0.9), layout="constrained")
    axes = figure.subplots()
    for row, name in enumerate(names):
        axes.plot(shares[name], [row] * len(shares[name]), "|", color=PURE, ms=9, alpha=0.5)
        axes.plot([float(np.mean(shares[name]))], [row], "o", color=MIXED, ms=5)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0.0, 100.0)
    axes.set_xlabel("time computing, % (line: a group, dot: mean)")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure

"""How much N_max and rho matter: best tokens per dollar of every phase as they grow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from catalog import reads
from catalog.store import Catalog
from planner.placement.profile import GIB
from planner.types import Combination, Market, Phase, Template
from tasks.coral_task import coral_task
from tasks.inputs import Inputs, PhaseInputs
from tasks.library import all_keys

SECONDS_PER_HOUR = 3600.0
BEST, CLASS_MEAN = "tokens_per_usd", "class_mean_tokens_per_usd"  # values of a point


@dataclass(frozen=True, slots=True)
class Point:
    """The best template of a phase under caps on nodes and memory."""

    workload: str
    phase: Phase
    max_nodes: int
    memory_ratio: float
    tokens_per_usd: float  # 0 where no template is within the caps
    class_mean_tokens_per_usd: float  # mean over node classes of the best template that uses each
    placement: str


@dataclass(frozen=True)
class Sensitivity:
    """Best tokens per dollar over N_max (at the largest rho), and over rho (at most nodes)."""

    by_nodes: tuple[Point, ...]
    by_memory: tuple[Point, ...]
    plot: Path


def measure_sensitivity(catalog: Catalog, inputs: Inputs) -> Sensitivity:
    """Sweep caps over a library that is built for the largest of them.

    A combination that is no better than its parts has no template, but the parts cost the same
    together: the best tokens per dollar is that of the whole library at every cap. A template costs
    what its nodes cost on demand in the cheapest domain that rents them all.
    """
    prices = _on_demand_prices(inputs)
    placement = inputs.scenario.placement
    ratios = [float(ratio) for ratio in range(2, math.ceil(placement.memory_ratio))]
    ratios.append(placement.memory_ratio)
    by_nodes: list[Point] = []
    by_memory: list[Point] = []
    for phase in inputs.phases:
        with catalog.read() as connection:
            templates = reads.read_templates(connection, all_keys(phase))
        valued = [
            (value, template)
            for template in templates
            if (value := _tokens_per_usd(phase, template, prices)) is not None
        ]
        valued.sort(key=lambda pair: (-pair[0], pair[1].id))
        by_nodes += [
            _best(phase, valued, nodes, placement.memory_ratio)
            for nodes in range(1, placement.max_nodes + 1)
        ]
        by_memory += [_best(phase, valued, placement.max_nodes, ratio) for ratio in ratios]
    plot = catalog.home / "reports" / f"sensitivity-{inputs.scenario.name}.png"
    plot.parent.mkdir(parents=True, exist_ok=True)
    _draw(by_nodes, by_memory, inputs.scenario.name, plot)
    return Sensitivity(tuple(by_nodes), tuple(by_memory), plot)


measure_sensitivity_task = coral_task("measure-sensitivity", measure_sensitivity)


def plateau(points: Sequence[Point], cap: str, value: str, within: float = 0.005) -> float:
    """Smallest cap from which every phase is within a share of its best at the largest cap."""
    series: dict[tuple[str, Phase], list[Point]] = {}
    for point in points:
        series.setdefault((point.workload, point.phase), []).append(point)
    needed = 0.0
    for line in series.values():
        best = float(getattr(line[-1], value))
        enough = [p for p in line if float(getattr(p, value)) >= (1.0 - within) * best]
        needed = max(needed, float(getattr(enough[0], cap)))
    return needed


def _best(
    phase: PhaseInputs, valued: Sequence[tuple[float, Template]], nodes: int, ratio: float
) -> Point:
    """`valued`: templates with their tokens per USD, best first."""
    memory_gib = ratio * phase.problem.terms.model_bytes / GIB
    best, placement = 0.0, ""
    by_class: dict[str, float] = {}
    for value, template in valued:
        fits = template.nodes == 1 or _memory_gib(phase, template.combination) <= memory_gib
        if template.nodes > nodes or not fits:
            continue
        if not placement:
            best, placement = value, template.placement.describe()
        for name, _ in template.combination:
            by_class.setdefault(name, value)
        if len(by_class) == len(phase.problem.names):
            break
    mean = sum(by_class.values()) / len(phase.problem.names)
    name = phase.workload.name
    return Point(name, phase.problem.phase, nodes, ratio, best, mean, placement)


def _memory_gib(phase: PhaseInputs, combination: Combination) -> float:
    return sum(phase.problem.nodes[name].memory_gib * count for name, count in combination)


def _tokens_per_usd(
    phase: PhaseInputs, template: Template, prices: Mapping[str, Mapping[str, float]]
) -> float | None:
    """None where no domain rents all its nodes on demand."""
    costs = [
        sum(found[name] * count for name, count in template.combination)
        for found in prices.values()
        if all(name in found for name, _ in template.combination)
    ]
    if not costs:
        return None
    lengths = phase.workload.lengths
    tokens = {
        Phase.PREFILL: lengths.mean_input,
        Phase.DECODE: lengths.mean_output,
        Phase.AGGREGATED: lengths.mean_input + lengths.mean_output,
    }[template.phase]
    return template.throughput_rps * tokens * SECONDS_PER_HOUR / min(costs)


def _on_demand_prices(inputs: Inputs) -> Mapping[str, Mapping[str, float]]:
    """USD/hour by domain and node class."""
    prices: dict[str, dict[str, float]] = {}
    for offer in inputs.scenario.offers:
        if offer.market is Market.ON_DEMAND:
            found = prices.setdefault(offer.domain, {})
            price = found.get(offer.node_class, offer.price_usd_per_hour)
            found[offer.node_class] = min(price, offer.price_usd_per_hour)
    return prices


def _draw(by_nodes: Sequence[Point], by_memory: Sequence[Point], name: str, path: Path) -> None:
    """One row per phase; every line is relative to its best."""
    phases = [phase for phase in Phase if any(p.phase is phase for p in by_nodes)]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.0, 2.7 * len(phases)), layout="constrained")
        axes = figure.subplots(len(phases), 2, squeeze=False, sharey="row")
        for row, phase in enumerate(phases):
            for axis, points, of in (
                (axes[row][0], by_nodes, "max_nodes"),
                (axes[row][1], by_memory, "memory_ratio"),
            ):
                _draw_lines(axis, [p for p in points if p.phase is phase], of)
            axes[row][0].set_ylabel(f"{phase}: best tokens per USD\n(of the best at all)")
            axes[row][1].legend(frameon=False, fontsize=7, loc="lower right")
        axes[-1][0].set_xlabel("most nodes of a replica (N_max)")
        axes[-1][1].set_xlabel("most memory, times the model's (rho)")
        figure.suptitle(
            f"What larger combinations are worth: scenario {name}\nsolid: best template; dashed: "
            "mean over node classes of the best template that uses the class",
            fontsize=9,
        )
        figure.savefig(path, dpi=130)


def _draw_lines(axis: Axes, points: Sequence[Point], cap: str) -> None:
    """Solid: the best template; dashed: the mean over node classes."""
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(point.workload, []).append(point)
    for index, (workload, line) in enumerate(lines.items()):
        best = line[-1].tokens_per_usd
        if best <= 0:
            continue
        caps = [getattr(p, cap) for p in line]
        color = f"C{index}"
        solid = [p.tokens_per_usd / best for p in line]
        axis.plot(caps, solid, "o-", color=color, markersize=3, linewidth=1.2, label=workload)
        dashed = [p.class_mean_tokens_per_usd / best for p in line]
        axis.plot(caps, dashed, ".--", color=color, markersize=4, linewidth=1.0)
    axis.grid(alpha=0.25)
    axis.set_ylim(0.0, 1.05)

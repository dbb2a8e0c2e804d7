"""Coral against the baselines: ratios as the paper gives them, and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import polars as pl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

CORAL = "coral"
SERVED_ALL = 0.9999  # shares above it count as everything


@dataclass(frozen=True)
class Line:
    """What one planner made of one case."""

    case: str
    group: str
    planner: str
    usd_per_hour: float
    served_share: float
    served_tokens_per_s: float
    nodes: int
    gap: float | None  # None: a heuristic, or several orders
    seconds: float


@dataclass(frozen=True)
class Ratio:
    """A planner against Coral over all cases."""

    planner: str
    cost_cases: int  # where both serve everything
    cost_median: float | None  # its cost over Coral's
    cost_max: float | None
    goodput_cases: int  # the other ones
    goodput_median: float | None  # Coral's served tokens/s over its own
    goodput_max: float | None
    nothing_cases: int  # where it serves nothing at all


def ratios(lines: Sequence[Line]) -> list[Ratio]:
    """Cost ratios where both sides serve everything, goodput ratios elsewhere."""
    coral = {line.case: line for line in lines if line.planner == CORAL}
    found = []
    for planner in dict.fromkeys(line.planner for line in lines if line.planner != CORAL):
        costs, goodputs, nothing = [], [], 0
        for line in lines:
            if line.planner != planner:
                continue
            mine = coral[line.case]
            if min(line.served_share, mine.served_share) >= SERVED_ALL and mine.usd_per_hour > 0:
                costs.append(line.usd_per_hour / mine.usd_per_hour)
            elif min(line.served_share, mine.served_share) >= SERVED_ALL:
                continue  # both for nothing
            elif line.served_tokens_per_s > 0:
                goodputs.append(mine.served_tokens_per_s / line.served_tokens_per_s)
            else:
                nothing += 1
        found.append(
            Ratio(planner, len(costs), *_middle_and_most(costs), len(goodputs),
                  *_middle_and_most(goodputs), nothing)
        )  # fmt: skip
    return found


def _middle_and_most(values: Sequence[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    return float(pl.Series(values).median()), max(values)  # type: ignore[arg-type]


def draw_lines(lines: Sequence[Line], title: str, path: Path) -> None:
    """Cost and served share by case, one colour per planner."""
    planners = list(dict.fromkeys(line.planner for line in lines))
    cases = list(dict.fromkeys(line.case for line in lines))
    by_key = {(line.case, line.planner): line for line in lines}
    width = 0.8 / len(planners)
    with mpl.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        size = (max(6.0, 1.1 * len(cases) + 2.0), 6.0)
        figure = Figure(figsize=size, layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True)
        for number, planner in enumerate(planners):
            found = [by_key[case, planner] for case in cases if (case, planner) in by_key]
            shift = (number - len(planners) / 2 + 0.5) * width
            places = [cases.index(line.case) + shift for line in found]
            whole = [line.served_share >= SERVED_ALL for line in found]
            color = f"C{number}"
            bars = top.bar(places, [line.usd_per_hour for line in found], width, color=color)
            for bar, all_served in zip(bars, whole, strict=True):
                bar.set_alpha(1.0 if all_served else 0.35)
            bottom.bar(places, [line.served_share for line in found], width, color=color)
        top.set_ylabel("USD/hour (pale: not all served)")
        bottom.set_ylabel("share of requests served")
        bottom.set_ylim(0.0, 1.05)
        bottom.set_xticks(
            range(len(cases)),
            cases,
            rotation=30 if len(cases) > 6 else 0,
            ha="right" if len(cases) > 6 else "center",
        )
        names = [Patch(color=f"C{n}", label=planner) for n, planner in enumerate(planners)]
        figure.legend(
            handles=names, loc="outside lower center", ncols=min(4, len(names)), frameon=False
        )
        top.set_title(f"{title[0].upper()}{title[1:]}", fontsize=9)
        figure.savefig(path, dpi=130)

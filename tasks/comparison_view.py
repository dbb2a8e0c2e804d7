"""Coral against the baselines: lines, and ratios as the paper gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from planner.engine import Engine

CORAL = "coral"
SERVED_ALL = 0.9999  # shares above it count as everything
TITLES = {
    Engine.ANY: "all templates",
    Engine.VLLM: "templates that stock vLLM runs",
    Engine.CORAL: "templates that Coral's pipelines run",
}


@dataclass(frozen=True)
class Line:
    """What one planner made of one case with one engine's templates."""

    engine: Engine
    case: str
    group: str
    planner: str
    usd_per_hour: float
    served_share: float
    served_tokens_per_s: float
    nodes: int
    gap: float | None  # None: a heuristic, or several orders
    seconds: float
    attainment: float | None = None  # share of the requests served within both SLOs, simulated
    goodput_tokens_per_s: float | None = None  # output tokens of those

    @property
    def served_all(self) -> bool:
        return self.served_share >= SERVED_ALL


@dataclass(frozen=True)
class Ratio:
    """A planner against Coral with the same engine, over all cases."""

    engine: Engine
    planner: str
    cost_cases: int  # where both serve everything
    cost_median: float | None  # its cost over Coral's
    cost_max: float | None
    goodput_cases: int  # the other ones
    goodput_median: float | None  # Coral's served tokens/s over its own
    goodput_max: float | None
    nothing_cases: int  # where it serves nothing at all, and Coral something


def ratios(lines: Sequence[Line]) -> list[Ratio]:
    """Cost ratios where both sides serve everything, goodput ratios elsewhere."""
    coral = {(line.engine, line.case): line for line in lines if line.planner == CORAL}
    found = []
    keys = dict.fromkeys((line.engine, line.planner) for line in lines if line.planner != CORAL)
    for engine, planner in keys:
        costs, goodputs, nothing = [], [], 0
        for line in lines:
            if (line.engine, line.planner) != (engine, planner):
                continue
            mine = coral[engine, line.case]
            if line.served_all and mine.served_all:
                if mine.usd_per_hour > 0:  # else both for nothing
                    costs.append(line.usd_per_hour / mine.usd_per_hour)
            elif line.served_tokens_per_s > 0:
                goodputs.append(mine.served_tokens_per_s / line.served_tokens_per_s)
            elif mine.served_tokens_per_s > 0:
                nothing += 1
        found.append(
            Ratio(engine, planner, len(costs), *_middle_and_most(costs), len(goodputs),
                  *_middle_and_most(goodputs), nothing)
        )  # fmt: skip
    return found


def _middle_and_most(values: Sequence[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    return float(pl.Series(values).median()), max(values)  # type: ignore[arg-type]

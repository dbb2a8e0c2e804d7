"""Pipelines over regions with slow links between them, over a throughput table.

Coral keeps a replica inside one domain. Where no region can hold the model, as in Helix's cluster
of three regions, this is the least that its placement needs more: stages stay inside a region, and
where the pipeline passes from one region to the next, the links between the two stages must carry
its tokens. Source: docs/formulation.md, section 9.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from planner.errors import NoTemplateError
from planner.perf.grids import Floats
from planner.placement.combinations import sub_multisets
from planner.placement.rate_pipeline import (
    TOLERANCE,
    best_pipeline,
    next_target,
    smallest_sets,
)
from planner.placement.rates import RatePipeline, RateStage, RateTable
from planner.programs import Program, solve_program
from planner.types import Combination, combination_of

ILP_TIME_LIMIT_S = 60.0
LEAST_SHARE = 1e-3  # of the bound without links: less than that counts as nothing

Path = tuple[str, ...]  # regions in the order in which a token passes them


@dataclass(frozen=True)
class Regions:
    """Machines by region, and the tokens/s of the slowest link between two regions."""

    machines: Mapping[str, Combination]
    link_tokens_per_s: Mapping[tuple[str, str], float]

    def link(self, one: str, other: str) -> float:
        """Of the slower direction; 0 where there is none."""
        rates = self.link_tokens_per_s
        return min(rates.get((one, other), 0.0), rates.get((other, one), 0.0))

    @property
    def paths(self) -> list[Path]:
        """Orders of some or all regions; links are alike both ways, so a reverse is left out."""
        names = sorted(self.machines)
        found = [p for size in range(1, len(names) + 1) for p in permutations(names, size)]
        return [path for path in found if path <= path[::-1]]


@dataclass(frozen=True, slots=True)
class _Column:
    """One stage, or the two stages on both sides of a crossing."""

    stages: tuple[RateStage, ...]
    tokens_per_s: float  # of the lesser stage, or of the links between the two

    @property
    def layers(self) -> int:
        return sum(stage.layers for stage in self.stages)


def best_regional_pipeline(table: RateTable, regions: Regions) -> RatePipeline:
    """Bisection as in `best_pipeline`, trying every path.

    Best among pipelines whose stages are inside one region, that pass each region once and have at
    least two stages in a region between two others; every link between two regions counts as the
    slowest of them. (A program that runs out of time counts as one without a solution.) The bound
    is that of the machines without their links.
    Raises MissingProfileError, NoTemplateError: as `best_pipeline`.
    """
    counts: dict[str, int] = {}
    for combination in regions.machines.values():
        for name, count in combination:
            counts[name] = counts.get(name, 0) + count
    bound = best_pipeline(table, combination_of(counts)).bound_tokens_per_s
    served, most, best = 0.0, bound, None
    target = most
    while most > max(served, LEAST_SHARE * bound) * (1.0 + TOLERANCE):
        found = _pipeline_at(table, regions, target)
        if found is None:
            most = target
        else:
            served, best = found.tokens_per_s, found
        target = next_target(served, most, failed=found is None)
    if best is None:
        raise NoTemplateError(
            f"{table.model}: no pipeline over these regions' links; add machines to one region"
        )
    return replace(best, bound_tokens_per_s=bound)


def _pipeline_at(table: RateTable, regions: Regions, least: float) -> RatePipeline | None:
    """A pipeline, its stages in order, that serves `least` tokens/s at the slowest links.

    Variables  stage[k], integer >= 0, k a stage; cross[k], k the stages on both sides of a crossing
    Minimise   the machines used
    Such that  layers add to L                                                       (P1)
               machines of each class in each region, at most those there            (P2)
               one crossing per passage from a region of the path to the next
    """
    inner = {r: list(_inner(table, r, found, least)) for r, found in regions.machines.items()}
    crossings: dict[tuple[str, str], list[_Column]] = {}
    for path in regions.paths:
        columns = [column for region in path for column in inner[region]]
        groups = [-1] * len(columns)
        for number, (one, other) in enumerate(pairwise(path)):
            if (one, other) not in crossings:
                crossings[one, other] = list(_crossings(table, regions, one, other, least))
            columns += crossings[one, other]
            groups += [number] * len(crossings[one, other])
        chosen = _solve(table, regions, path, columns, groups)
        if chosen is not None:
            slowest = min(column.tokens_per_s for column in chosen)
            return RatePipeline(_ordered(path, chosen), np.inf, slowest)
    return None


def _solve(
    table: RateTable, regions: Regions, path: Path, columns: Sequence[_Column], groups: list[int]
) -> list[_Column] | None:
    places = [(r, name, count) for r in path for name, count in regions.machines[r]]
    row_of = {(r, name): 1 + index for index, (r, name, _) in enumerate(places)}
    passages = len(path) - 1
    if {*range(passages)} - {*groups} or not columns:
        return None
    matrix = np.zeros((1 + len(places) + passages, len(columns)))
    for k, (column, group) in enumerate(zip(columns, groups, strict=True)):
        matrix[0, k] = column.layers
        for stage in column.stages:
            for name, count in stage.machines:
                matrix[row_of[stage.region, name], k] += count
        if group >= 0:
            matrix[1 + len(places) + group, k] = 1.0
    machines = [float(count) for _, _, count in places]
    program = Program(
        matrix=sparse.csc_array(matrix),
        cost=matrix[1 : 1 + len(places)].sum(axis=0),
        lower=np.zeros(len(columns)),
        upper=np.full(len(columns), np.inf),
        row_lower=np.array([table.layers, *[-np.inf] * len(places), *[1.0] * passages]),
        row_upper=np.array([table.layers, *machines, *[1.0] * passages]),
        integer=np.ones(len(columns), dtype=bool),
    )
    answer = solve_program(program, time_limit_s=ILP_TIME_LIMIT_S, relative_gap=0.5)
    if answer.values is None:
        return None
    uses = np.rint(answer.values).astype(int).tolist()
    return [column for column, count in zip(columns, uses, strict=True) for _ in range(count)]


def _ordered(path: Path, chosen: Sequence[_Column]) -> tuple[RateStage, ...]:
    """Region after region: its stages, then the crossing out of it."""
    ordered: list[RateStage] = []
    for index, region in enumerate(path):
        ordered += [c.stages[0] for c in chosen if len(c.stages) == 1
                    and c.stages[0].region == region]  # fmt: skip
        if index + 1 < len(path):
            ordered += next(c for c in chosen if len(c.stages) == 2
                            and (c.stages[0].region, c.stages[1].region)
                            == (region, path[index + 1])).stages  # fmt: skip
    return tuple(ordered)


def _inner(table: RateTable, region: str, machines: Combination, least: float) -> Iterator[_Column]:
    counts = np.array([count for _, count in machines], dtype=np.int64)
    rates = table.rates_of(machines)
    for layers in range(1, rates.shape[1]):
        for part in smallest_sets(rates[:, layers], counts, least):
            stage = _stage(region, machines, part, layers, rates)
            yield _Column((stage,), stage.tokens_per_s)


def _crossings(
    table: RateTable, regions: Regions, one: str, other: str, least: float
) -> Iterator[_Column]:
    """The smallest pairs of stages that the links between two regions let serve `least`."""
    link = regions.link(one, other)
    sides = [_sides(table, region, regions.machines[region], least) for region in (one, other)]
    for outs in sides[0].values():
        for ins in sides[1].values():
            kept = np.empty((0, len(ins[0].part) + len(outs[0].part)), dtype=np.int64)
            pairs = [
                (a, b) for a in outs for b in ins if a.rates.size * b.rates.size * link >= least
            ]
            for a, b in sorted(pairs, key=lambda pair: pair[0].rates.size + pair[1].rates.size):
                both = np.array([*a.part, *b.part], dtype=np.int64)
                if (kept <= both).all(axis=1).any():
                    continue
                flow = crossing_flow(a.rates, b.rates, link)
                if flow >= least:
                    kept = np.vstack([kept, both])
                    yield _Column((a.stage, b.stage), flow)


@dataclass(frozen=True, slots=True)
class _Side:
    part: tuple[int, ...]
    rates: Floats  # of every machine, rising
    stage: RateStage


def _sides(
    table: RateTable, region: str, machines: Combination, least: float
) -> dict[int, list[_Side]]:
    """By layers, every set of a region's machines that reaches `least`."""
    rates = table.rates_of(machines)
    found: dict[int, list[_Side]] = {}
    for layers in range(1, rates.shape[1]):
        for chosen in sub_multisets(machines):
            counts = dict(chosen)
            part = np.array([counts.get(name, 0) for name, _ in machines], dtype=np.int64)
            if rates[part > 0, layers].all() and part @ rates[:, layers] >= least:
                found.setdefault(layers, []).append(
                    _Side(
                        tuple(part.tolist()),
                        np.sort(np.repeat(rates[:, layers], part)),
                        _stage(region, machines, part, layers, rates),
                    )
                )
    return found


def crossing_flow(out_rates: Floats, in_rates: Floats, link: float) -> float:
    """Most tokens/s from one set of nodes to another, every pair with a link of its own.

    The least cut: i nodes of one side and k of the other are joined by i k links, the others are
    cut at their own rates, the slowest first. Rates rising, tokens/s.
    """
    out_cut = np.concatenate([[0.0], np.cumsum(out_rates)])[::-1]  # by i: the others' rates
    in_cut = np.concatenate([[0.0], np.cumsum(in_rates)])[::-1]
    joined = np.outer(np.arange(len(out_cut)), np.arange(len(in_cut))) * link
    return float((out_cut[:, None] + joined + in_cut[None, :]).min())


def _stage(
    region: str, machines: Combination, part: NDArray[np.int64], layers: int, rates: Floats
) -> RateStage:
    counts = {name: int(count) for (name, _), count in zip(machines, part, strict=True)}
    return RateStage(combination_of(counts), layers, float(part @ rates[:, layers]), region)

"""The placement ILP for a fixed number M and size b of micro-batches, under a cap.

Source: docs/formulation.md, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp
from numpy.typing import NDArray

from planner.perf.grids import Floats
from planner.placement.combinations import sub_multisets
from planner.placement.stages import Role, StageTable, units_of
from planner.solver import Outcome, solve
from planner.types import Combination, combination_size

PIPELINE_ROLES = (Role.FIRST, Role.MIDDLE, Role.LAST)


@dataclass(frozen=True, slots=True)
class StageChoice:
    """One stage of a solution: nodes in a role with their number of layers."""

    role: Role
    part: Combination
    layers: int


@dataclass(frozen=True)
class Columns:
    """Every possible stage of a pipeline, one entry per (role, nodes, layers)."""

    roles: NDArray[np.int8]  # index into PIPELINE_ROLES
    parts: NDArray[np.int32]  # index into part_list
    layers: NDArray[np.int32]
    latency_ms: Floats  # of the stage alone; in cycles its step, what the cap is on
    sum_ms: Floats  # what the stage adds to the latency, its hop included
    part_list: tuple[Combination, ...]

    def under(self, cap_ms: float) -> NDArray[np.intp]:
        """Positions of the columns whose step stays under the cap."""
        return np.flatnonzero(self.latency_ms <= cap_ms)

    def choice(self, position: int) -> StageChoice:
        return StageChoice(
            PIPELINE_ROLES[self.roles[position]],
            self.part_list[self.parts[position]],
            int(self.layers[position]),
        )


@dataclass(frozen=True, slots=True)
class MinSum:
    """The pipeline of least latency under a cap."""

    stages: tuple[StageChoice, ...]  # in pipeline order, layers adding to L
    proven: bool


def pipeline_columns(
    table: StageTable,
    combination: Combination,
    micro_batches: int,
    batch: int,
    hop: float,
    longest_ms: float,
    least_share: int = 0,
    cap_ms: float = np.inf,
) -> Columns:
    """Stages of pipelines of two and more for one (M, b); none longer than `longest_ms`.

    Only prefill needs the cap here: its latency depends on which steps are allowed.
    """
    nodes = combination_size(combination)
    parts: list[Combination] = []
    blocks: list[tuple[int, int, NDArray[np.intp], Floats, Floats]] = []
    for part in sub_multisets(combination):
        for role_index, role in enumerate(PIPELINE_ROLES):
            if combination_size(part) > nodes - (2 if role is Role.MIDDLE else 1):
                continue
            latency = table.latency_ms(
                units_of(part), role, micro_batches, batch, least_share, cap_ms
            )
            summed = latency + (0.0 if role.is_last else hop)
            layers = np.flatnonzero(np.isfinite(latency) & (summed <= longest_ms))
            layers = layers[layers > 0]
            if layers.size:
                parts.append(part)
                block = (role_index, len(parts) - 1, layers, latency[layers], summed[layers])
                blocks.append(block)
    sizes = [block[2].size for block in blocks]
    return Columns(
        roles=np.repeat([block[0] for block in blocks], sizes).astype(np.int8),
        parts=np.repeat([block[1] for block in blocks], sizes).astype(np.int32),
        layers=_join([block[2] for block in blocks]).astype(np.int32),
        latency_ms=_join([block[3] for block in blocks]),
        sum_ms=_join([block[4] for block in blocks]),
        part_list=tuple(parts),
    )


def _join(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0)


def min_sum_pipeline(
    columns: Columns,
    combination: Combination,
    total_layers: int,
    cap_ms: float,
    budget_ms: float,
    time_limit_s: float,
) -> MinSum | None:
    """Pipeline of least summed latency whose every stage stays under the cap; None if none.

    Variables  stage[k], integer: how often column k = (role, nodes, layers) is used
    Minimise   sum sum_ms[k] stage[k]                                        ms
    Such that  sum layers[k] stage[k] >= L                                   (P1)
               one first stage, one last stage                               (P1)
               sum count[nodes k, c] stage[k] <= nodes of class c            (P2)
               sum sum_ms[k] stage[k] <= budget                              (P5)
               columns over the cap or without memory are left out           (P3, P4)
    Source     docs/formulation.md, section 3. P1 may exceed L: times never fall with layers, so
               surplus layers are taken off on reading back and nothing gets slower.
    """
    kept = columns.under(cap_ms)
    if not _can_cover(columns, kept, total_layers):
        return None
    problem = pulp.LpProblem("placement", pulp.LpMinimize)
    stage = [
        pulp.LpVariable(f"stage_{k}", 0, 1 if columns.roles[k] != 1 else None, pulp.LpInteger)
        for k in kept
    ]
    total = pulp.LpAffineExpression(list(zip(stage, columns.sum_ms[kept].tolist(), strict=True)))
    problem += total
    problem += (
        pulp.LpAffineExpression(list(zip(stage, columns.layers[kept].tolist(), strict=True)))
        >= total_layers,
        "P1_layers",
    )
    for role_index, name in ((0, "first"), (2, "last")):
        chosen = [v for v, k in zip(stage, kept, strict=True) if columns.roles[k] == role_index]
        problem += pulp.lpSum(chosen) == 1, f"P1_{name}"
    for index, (name, available) in enumerate(combination):
        used = [dict(part).get(name, 0) for part in columns.part_list]
        terms = [
            (v, used[columns.parts[k]])
            for v, k in zip(stage, kept, strict=True)
            if used[columns.parts[k]]
        ]
        problem += pulp.LpAffineExpression(terms) <= available, f"P2_nodes_{index}"
    if np.isfinite(budget_ms):
        problem += total <= budget_ms, "P5_latency"
    report = solve(problem, time_limit_s=time_limit_s)
    if report.outcome is Outcome.INFEASIBLE:
        return None
    chosen_columns = [
        columns.choice(k)
        for v, k in zip(stage, kept, strict=True)
        for _ in range(round(v.value() or 0.0))
    ]
    return MinSum(_trim(chosen_columns, total_layers), report.outcome is Outcome.PROVEN)


def _can_cover(columns: Columns, kept: NDArray[np.intp], total_layers: int) -> bool:
    """Cheap necessary condition: a first and a last stage exist."""
    roles = columns.roles[kept]
    return bool((roles == 0).any() and (roles == 2).any()) and total_layers >= 2


def _trim(stages: Sequence[StageChoice], total_layers: int) -> tuple[StageChoice, ...]:
    """Pipeline order, with surplus layers taken off (the largest stage first)."""
    ordered = sorted(stages, key=lambda s: PIPELINE_ROLES.index(s.role))
    layers = [s.layers for s in ordered]
    surplus = sum(layers) - total_layers
    while surplus > 0:
        largest = max(range(len(layers)), key=layers.__getitem__)
        layers[largest] -= 1
        surplus -= 1
    return tuple(StageChoice(s.role, s.part, n) for s, n in zip(ordered, layers, strict=True))

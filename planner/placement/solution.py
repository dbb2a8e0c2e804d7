"""What a placement solver answers, and the interface that both solvers have."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.perf.grids import Floats
from planner.placement import kernels
from planner.placement.combinations import Members
from planner.types import Placement


class Outcome(StrEnum):
    """Why a combination has a template or none."""

    KEPT = "kept"
    BOUND_WORK = "no better than its parts, by the bound of work"
    BOUND_LAYERS = "no better than its parts, by the bound of layers"
    BOUND_LATENCY = "no better than its parts, by the bound of latency"
    NO_GAIN = "no better than its parts, by search"
    INFEASIBLE = "no placement inside the SLO"

    @classmethod
    def of(cls, code: int, floor_rps: float) -> Outcome:
        """From a code of the compiled solver."""
        if code == kernels.GAINED:
            return cls.KEPT
        if floor_rps <= 0.0:
            return cls.INFEASIBLE
        return {
            kernels.WORK: cls.BOUND_WORK,
            kernels.LAYERS: cls.BOUND_LAYERS,
            kernels.LATENCY: cls.BOUND_LATENCY,
            kernels.SEARCHED: cls.NO_GAIN,
        }[code]


@dataclass
class Solved:
    """Results of combinations of one size, by row."""

    outcomes: list[Outcome]
    best_rps: Floats  # its own or its parts', before utilisation
    proven: NDArray[np.bool_]
    searches: NDArray[np.int64]  # dynamic programs or ILPs; 0 where bounds were enough
    placements: dict[int, Placement] = field(default_factory=dict)

    @classmethod
    def empty(cls, rows: int) -> Solved:
        return cls(
            [Outcome.INFEASIBLE] * rows,
            np.zeros(rows),
            np.ones(rows, dtype=bool),
            np.zeros(rows, dtype=np.int64),
        )

    def set(
        self,
        row: int,
        outcome: Outcome,
        floor_rps: float,
        placement: Placement | None,
        *,
        searches: int,
        proven: bool = True,
    ) -> None:
        """Fill in one row."""
        self.outcomes[row] = outcome
        self.best_rps[row] = placement.raw_rps if placement else floor_rps
        self.proven[row] = proven
        self.searches[row] = searches
        if placement is not None:
            self.placements[row] = placement


class PlacementSolver(Protocol):
    """Best placements of combinations of one size that beat their floors."""

    def solve(self, members: Members, floors: Floats) -> Solved: ...

"""Throughput tables: what machines of each type serve, holding so many layers of one model.

Some systems publish tokens/s per machine and layers held instead of the times of steps. A stage is
then worth the sum over its machines, and a pipeline its least stage.
Source: docs/formulation.md, section 9.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from planner.errors import InputError, MissingProfileError, NoTemplateError
from planner.perf.grids import Floats
from planner.types import Combination, describe_combination


@dataclass(frozen=True)
class RateTable:
    """Tokens/s of one machine of each type, holding 1, 2, ... layers of one model."""

    model: str
    layers: int  # L
    tokens_per_s: Mapping[str, tuple[float, ...]]  # by machine type; up to the most it may hold

    @classmethod
    def of(cls, model: str, layers: int, rows: Mapping[str, Mapping[int, float]]) -> RateTable:
        """From tokens/s by machine type and number of layers.

        Raises MissingProfileError: a machine type without rows, or whose rows leave one out.
        InputError: a rate that is not a positive number, or a model without layers.
        """
        if layers < 1:
            raise InputError(f"{model}: a model has at least one layer, got {layers}")
        rates: dict[str, tuple[float, ...]] = {}
        for machine, found in sorted(rows.items()):
            missing = sorted(set(range(1, max(found, default=1) + 1)) - found.keys())
            if missing:
                raise MissingProfileError(
                    f"{model}: the table of {machine} lacks {missing[0]} layers; it needs every "
                    "number from 1 to the most that the machine may hold"
                )
            if not all(math.isfinite(rate) and rate > 0 for rate in found.values()):
                raise InputError(f"{model}: a throughput of {machine} is not a positive number")
            rates[machine] = tuple(found[held] for held in sorted(found) if 1 <= held <= layers)
        return cls(model, layers, rates)

    def rates_of(self, combination: Combination) -> Floats:
        """T[i, l]: tokens/s of a machine of class i with l layers, 0 for more than it may hold.

        Shape (classes, most layers + 1).
        Raises MissingProfileError: no table of a machine type.
        """
        for name, _ in combination:
            if name not in self.tokens_per_s:
                raise MissingProfileError(
                    f"{self.model} has no throughput table of machine {name!r}; "
                    f"there are: {', '.join(self.tokens_per_s)}"
                )
        most = max((len(self.tokens_per_s[name]) for name, _ in combination), default=0)
        rates = np.zeros((len(combination), most + 1))
        for index, (name, _) in enumerate(combination):
            row = self.tokens_per_s[name]
            rates[index, 1 : len(row) + 1] = row
        return rates

    def require_room(self, combination: Combination) -> None:
        """Raise NoTemplateError where all machines together may not hold the model's layers.

        Where they may, there is a pipeline: every rate is positive.
        """
        held = (self.rates_of(combination) > 0).sum(axis=1)
        room = sum(int(n) * count for n, (_, count) in zip(held, combination, strict=True))
        if room < self.layers:
            raise NoTemplateError(
                f"{self.model}: {describe_combination(combination) or 'no machine'} may hold "
                f"{room} of {self.layers} layers; add machines"
            )

    def work_bound(self, combination: Combination) -> float:
        """Tokens/s that no placement exceeds, in Helix's program neither.

        A token passes L layers, and a machine does at most max l T(l) token-layers per second.
        """
        rates = self.rates_of(combination)
        most = (rates * np.arange(rates.shape[1])).max(axis=1)
        return float(most @ np.array([count for _, count in combination])) / self.layers


@dataclass(frozen=True, slots=True)
class RateStage:
    """A contiguous layer range; every machine of the stage holds all of it."""

    machines: Combination
    layers: int
    tokens_per_s: float  # of all machines together
    region: str = ""  # where they are; only with links between regions

    def describe(self) -> str:
        """'[L4 + 2 T4 | 3 layers]'."""
        place = f" in {self.region}" if self.region else ""
        return f"[{describe_combination(self.machines)}{place} | {self.layers} layers]"


@dataclass(frozen=True)
class RatePipeline:
    """Stages whose layers add up to the model's, and what was proven.

    They may come in any order, unless there are regions.
    """

    stages: tuple[RateStage, ...]
    bound_tokens_per_s: float  # no pipeline on the same machines serves more
    link_tokens_per_s: float = math.inf  # what the links between regions let through

    @property
    def tokens_per_s(self) -> float:
        """That of the least stage, or of the links."""
        return min(self.link_tokens_per_s, *(stage.tokens_per_s for stage in self.stages))

    @property
    def machines(self) -> int:
        return sum(count for stage in self.stages for _, count in stage.machines)

    def describe(self) -> str:
        """'4 x [A100 | 8 layers] -> [L4 | 3 layers]'."""
        groups = [(text, len(list(same))) for text, same in
                  groupby(stage.describe() for stage in self.stages)]  # fmt: skip
        return " -> ".join(text if n == 1 else f"{n} x {text}" for text, n in groups)

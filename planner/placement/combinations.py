"""Which combinations of node classes are worth a placement (DESIGN: N_max and rho)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product
from math import comb

from planner.placement.profile import GIB, PhaseProblem
from planner.types import Combination, combination_of


@dataclass(frozen=True, slots=True)
class CombinationSet:
    """Combinations to solve, smallest first, and how many were left out for which reason."""

    by_size: tuple[tuple[Combination, ...], ...]  # index 0: single nodes
    left_out: dict[str, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Combination]:
        return (combination for level in self.by_size for combination in level)

    def __len__(self) -> int:
        return sum(len(level) for level in self.by_size)


def count_multisets(classes: int, max_nodes: int) -> int:
    """Multisets of 1 to max_nodes node classes."""
    return comb(classes + max_nodes, max_nodes) - 1


def enumerate_combinations(
    problem: PhaseProblem, max_nodes: int, memory_ratio: float
) -> CombinationSet:
    """All multisets of at most `max_nodes` classes with memory between 1x and rho x the model.

    Single nodes are exempt from rho: one big node is a real choice even for a small model.
    """
    model_gib = problem.terms.model_bytes / GIB
    left_out = {"memory below the model's weights": 0, "memory above rho times the weights": 0}
    levels: list[tuple[Combination, ...]] = []
    for size in range(1, max_nodes + 1):
        level = []
        for names in combinations_with_replacement(sorted(problem.nodes), size):
            memory_gib = sum(problem.nodes[name].memory_gib for name in names)
            if memory_gib < model_gib:
                left_out["memory below the model's weights"] += 1
            elif size > 1 and memory_gib > memory_ratio * model_gib:
                left_out["memory above rho times the weights"] += 1
            else:
                level.append(combination_of({name: names.count(name) for name in names}))
        levels.append(tuple(level))
    return CombinationSet(tuple(levels), left_out)


def sub_multisets(combination: Combination) -> Iterator[Combination]:
    """Every non-empty sub-multiset, the combination itself last."""
    names = [name for name, _ in combination]
    for counts in product(*(range(count + 1) for _, count in combination)):
        if any(counts):
            yield combination_of(dict(zip(names, counts, strict=True)))


def difference(whole: Combination, part: Combination) -> Combination:
    """Nodes of `whole` that are not in `part`."""
    rest = dict(whole)
    for name, count in part:
        rest[name] -= count
    return combination_of(rest)


def split_floor(combination: Combination, best: dict[Combination, float]) -> float:
    """Largest summed throughput of two combinations that make up this one.

    `best` holds, for every smaller combination, the larger of its own throughput and its own
    split floor. A combination that does not beat this floor is not worth a template: the two
    parts cost the same, fit the same stock and serve as much (docs/formulation.md, section 4).
    """
    floor = 0.0
    for part in sub_multisets(combination):
        if part != combination:
            rest = difference(combination, part)
            floor = max(floor, best.get(part, 0.0) + best.get(rest, 0.0))
    return floor

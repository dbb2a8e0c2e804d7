"""KV blocks of every node, and which node of a stage a request is on.

vLLM's scheduler counts blocks of one pool, that of the stage with the fewest. Every node has a pool
of its own: a request's blocks there have other numbers, and the scheduler asks here first whether
they fit. Pure: no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from . import PipelineError


@dataclass
class Pool:
    """One node's blocks; block 0 is kept free, as vLLM's null block is."""

    blocks: int
    weight: float = 1.0
    requests: int = 0  # pinned to it
    held: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(self.blocks - 1, 0, -1))

    def grow(self, request: str, total: int) -> list[int]:
        """Until the request has so many; the new ones."""
        mine = self.held.setdefault(request, [])
        new = [self.free.pop() for _ in range(total - len(mine))]
        mine += new
        return new

    def release(self, request: str) -> None:
        self.free += reversed(self.held.pop(request, []))

    def room_for(self, request: str, total: int) -> bool:
        return total - len(self.held.get(request, ())) <= len(self.free)


class Pools:
    """All pools, by stage and node."""

    def __init__(self, blocks: Sequence[Sequence[tuple[int, float]]]) -> None:
        self.stages = [[Pool(count, weight) for count, weight in stage] for stage in blocks]
        self.pins: dict[str, tuple[int, ...]] = {}

    @property
    def common(self) -> int:
        """Blocks that the scheduler may count on: those of the smallest stage."""
        return min(sum(pool.blocks - 1 for pool in stage) for stage in self.stages) + 1

    @property
    def longest(self) -> int:
        """Blocks of the longest request that every node of every stage can hold."""
        return min(pool.blocks - 1 for stage in self.stages for pool in stage)

    def fits(self, request: str, total: int) -> bool:
        """Whether every stage has blocks for a request, so many in all."""
        pins = self._pins_for(request, total)
        return pins is not None and all(
            stage[place].room_for(request, total)
            for stage, place in zip(self.stages, pins, strict=True)
        )

    def reserve(self, request: str, total: int) -> None:
        """Take them, where they fit; a new request stays on its nodes from then on.

        Raises PipelineError: they do not.
        """
        pins = self._pins_for(request, total)
        if pins is None:
            raise PipelineError(f"no node has {total} blocks for request {request}")
        if request not in self.pins:
            self._pin(request, pins)
        for pool in self._of(request):
            pool.grow(request, total)

    def pin(self, request: str) -> None:
        """Choose a request's nodes before it has blocks, whatever room they have now."""
        if request not in self.pins:
            self._pin(request, tuple(_choose(stage, request, 0) or 0 for stage in self.stages))

    def _pin(self, request: str, pins: tuple[int, ...]) -> None:
        self.pins[request] = pins
        for pool in self._of(request):
            pool.requests += 1

    def release(self, request: str) -> None:
        """Its blocks; it stays on its nodes, which know it."""
        for pool in self._of(request):
            pool.release(request)

    def forget(self, request: str) -> None:
        """It has ended."""
        for pool in self._of(request):
            pool.release(request)
            pool.requests -= 1
        self.pins.pop(request, None)

    def node_of(self, request: str, stage: int) -> int:
        return self.pins[request][stage]

    def last_blocks(self, request: str, stage: int, count: int) -> list[int]:
        """The last of a request's blocks on its node of a stage."""
        held = self.stages[stage][self.pins[request][stage]].held[request]
        return held[len(held) - count :]

    def _pins_for(self, request: str, total: int) -> tuple[int, ...] | None:
        """Its nodes; of a new request, of each stage the one that is farthest below its share."""
        if request in self.pins:
            return self.pins[request]
        found = [_choose(stage, request, total) for stage in self.stages]
        chosen = tuple(place for place in found if place is not None)
        return chosen if len(chosen) == len(found) else None

    def _of(self, request: str) -> list[Pool]:
        pins = self.pins.get(request, ())
        return [stage[place] for stage, place in zip(self.stages, pins, strict=False)]


def _choose(stage: Sequence[Pool], request: str, total: int) -> int | None:
    fits = [n for n, pool in enumerate(stage) if pool.room_for(request, total)]
    return min(fits, key=lambda n: ((stage[n].requests + 1) / stage[n].weight, n), default=None)

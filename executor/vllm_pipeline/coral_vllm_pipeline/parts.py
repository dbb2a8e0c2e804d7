"""Who has which layers and heads of a prompt's KV, and who is asked for what. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import PipelineError

MOST = 4096  # layers, or heads, of any model


@dataclass(frozen=True)
class Part:
    """What one worker has: layers, and heads of all the model's."""

    layers: tuple[int, ...]
    first_head: int
    heads: int

    def of(self, other: Part) -> Part | None:
        """What it shares with another; None: nothing."""
        layers = tuple(layer for layer in self.layers if layer in other.layers)
        first = max(self.first_head, other.first_head)
        heads = min(self.first_head + self.heads, other.first_head + other.heads) - first
        return Part(layers, first, heads) if layers and heads > 0 else None

    @property
    def size(self) -> int:
        return len(self.layers) * self.heads


def heads_of_rank(total: int, tensor_parallel_size: int, rank: int) -> tuple[int, int]:
    """The first head of a rank, and how many; ranks share one where there are too few."""
    if total >= tensor_parallel_size:
        count = total // tensor_parallel_size
        return rank * count, count
    return rank * total // tensor_parallel_size, 1


@dataclass(frozen=True)
class Source:
    """One worker of the prefill replica that computed a prompt."""

    address: str
    part: Part


@dataclass(frozen=True)
class Wish:
    """What is asked of one source."""

    source: Source
    part: Part
    share: float  # of what the source has of the prompt; all shares of a source make 1


def wishes(mine: Part, replicas: int, sources: Sequence[Source]) -> list[Wish]:
    """Every layer and head of a worker's own, each from one source.

    `replicas` of its replica's ranks have the same heads and ask for the same. Raises
    PipelineError: nobody has some layer.
    """
    missing = {(layer, mine.first_head + k) for layer in mine.layers for k in range(mine.heads)}
    found = []
    for source in sources:
        part = source.part.of(mine)
        if part is None:
            continue
        new = {(layer, part.first_head + k) for layer in part.layers for k in range(part.heads)}
        if new <= missing:  # ranks that share a head have the same: one of them is asked
            missing -= new
            found.append(Wish(source, part, part.size / source.part.size / replicas))
    if missing:
        raise PipelineError(f"nobody has layer {min(missing)[0]}")
    return found


def sources_to_json(sources: Sequence[Source]) -> list[Mapping[str, Any]]:
    """As they pass through the gateway."""
    return [
        {"address": one.address, "layers": [one.part.layers[0], len(one.part.layers)],
         "heads": [one.part.first_head, one.part.heads]}
        for one in sources
    ]  # fmt: skip


def sources_from_json(values: Any) -> list[Source]:
    """Whatever came with a request. Raises PipelineError: they are none."""
    try:
        found = []
        for one in values:
            (first, count), (head, heads) = (map(int, one[key]) for key in ("layers", "heads"))
            if first < 0 or head < 0 or not 0 < count <= MOST or not 0 < heads <= MOST:
                raise ValueError(f"{count} layers and {heads} heads")
            found.append(
                Source(str(one["address"]), Part(tuple(range(first, first + count)), head, heads))
            )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PipelineError(f"no sources of KV: {error!r}") from error
    return found

"""What passing on hidden states costs beside the network: as measured, or as assumed.

A measured hop is a line through the times of messages between two processes over the transport that
pipelines use: a latency, and per byte the time to copy, encrypt and hand over. The network's own
time comes on top. Source: docs/formulation.md, Hop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hop:
    """Between two stages, without the network."""

    latency_ms: float
    ms_per_byte: float


def hop_of(messages: Sequence[tuple[float, float]]) -> Hop | None:
    """The line through (bytes, ms) of the smallest and largest message; None: too few of them."""
    if len(messages) < 2:
        return None
    (small, least_ms), *_, (large, most_ms) = sorted(messages)
    per_byte = max(0.0, most_ms - least_ms) / (large - small)
    return Hop(max(0.0, least_ms - per_byte * small), per_byte)


def slowest(hops: Iterable[Hop]) -> Hop:
    """What a pipeline over nodes of several kinds is counted with."""
    found = list(hops)
    return Hop(max(h.latency_ms for h in found), max(h.ms_per_byte for h in found))

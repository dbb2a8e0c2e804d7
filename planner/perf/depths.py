"""Layers out of whole engine steps: what two depths of one model tell.

With step times s(L1) and s(L2) of the same work,

    layer = (s(L2) - s(L1)) / (L2 - L1)

and the rest is the engine. A layer's decode time is split at the line through its times over
context: its value at no context is linear work, what is above it is attention.
Source: docs/formulation.md, section 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner.errors import CoralError

LEAST_SHARE = 0.01  # of a layer, for a part that noise hides: a table has no zeros

DecodePoint = tuple[int, int]  # batch, context


class NoisyProfileError(CoralError):
    """Measured times that contradict each other."""


def layer_of_depths(shallow_ms: float, deep_ms: float, depths: tuple[int, int], what: str) -> float:
    """Milliseconds of one layer, of the same step at two depths.

    Raises NoisyProfileError: more layers took no longer.
    """
    layer_ms = (deep_ms - shallow_ms) / (depths[1] - depths[0])
    if layer_ms <= 0:
        raise NoisyProfileError(
            f"a step of {what} took {deep_ms:.3g} ms with {depths[1]} layers and "
            f"{shallow_ms:.3g} ms with {depths[0]}; leave the machine alone and measure again"
        )
    return layer_ms


def linear_of_batch(batch: int, decode: Mapping[DecodePoint, float]) -> float:
    """At no context, of the line over context; no less than a share of the least time."""
    contexts = sorted(c for b, c in decode if b == batch)
    times = [decode[batch, c] for c in contexts]
    if len(contexts) == 1:
        return times[0]
    slope, value = np.polyfit(contexts, times, 1)
    return float(np.clip(value if slope > 0 else min(times), LEAST_SHARE * min(times), min(times)))


def split_layer(ms: float, attention_ms: float) -> tuple[float, float]:
    """Linear and attention parts of a layer, both above zero."""
    attention = float(np.clip(attention_ms, LEAST_SHARE * ms, (1.0 - LEAST_SHARE) * ms))
    return ms - attention, attention

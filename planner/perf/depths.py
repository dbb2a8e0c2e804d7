"""Layers and engine apart: what two depths of one model tell from whole engine steps.

With step times s(L1) and s(L2) of the same work,

    layer = (s(L2) - s(L1)) / (L2 - L1)        rest = s(L1) - L1 layer

The rest at batch 1 is the engine's overhead per step; what it grows by with the batch is the head
(logits, sampling, and whatever else goes by requests). A layer's decode time is split at the
line through its times over context: its value at no context is linear work, what is above it is
attention. For prefill the same tokens as k prompts carry 1 / k of the attention.
Source: docs/formulation.md, section 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.errors import CoralError
from planner.perf.tables import LayerRow

LEAST_SHARE = 0.01  # of a layer, for a part that noise hides: a table has no zeros

DecodePoint = tuple[int, int]  # batch, context
PrefillPoint = tuple[int, int]  # prompts, tokens of all


class NoisyProfileError(CoralError):
    """Measured times that contradict each other."""


@dataclass(frozen=True, slots=True)
class DepthSteps:
    """Milliseconds of engine steps with so many layers."""

    layers: int
    decode: Mapping[DecodePoint, float]
    prefill: Mapping[PrefillPoint, float]


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One decode point of the deeper model beside what its layer rows say without overhead."""

    batch: int
    context: int
    ttft_ms: float  # of one prompt of about that many tokens
    measured_tpot_ms: float
    predicted_tpot_ms: float


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Rows of the layer table, and points to fit the engine's overhead on."""

    rows: tuple[LayerRow, ...]
    engine: tuple[EngineRow, ...]


def separate(shallow: DepthSteps, deep: DepthSteps, source: str) -> LayerProfile:
    """Layer rows and engine points of the steps at two depths.

    Raises NoisyProfileError: more layers took no longer.
    """
    depths = (shallow.layers, deep.layers)
    layer = _layers(shallow.decode, deep.decode, depths)
    rest = {point: shallow.decode[point] - shallow.layers * ms for point, ms in layer.items()}
    base = min(rest[point] for point in rest if point[0] == 1)
    batches = sorted({batch for batch, _ in layer})
    linear = {batch: linear_of_batch(batch, layer) for batch in batches}
    head = {
        batch: max(0.0, float(np.median([ms for (b, _), ms in rest.items() if b == batch])) - base)
        for batch in batches
    }
    decode = [
        LayerRow("decode", b, b, c, *split_layer(ms, ms - linear[b]), head[b], source)
        for (b, c), ms in sorted(layer.items())
    ]
    prompts = _layers(shallow.prefill, deep.prefill, depths)
    prefill = [
        LayerRow(
            "prefill", 1, tokens, 0, *split_layer(ms, _attention(tokens, prompts)), head[1], source
        )
        for (batch, tokens), ms in sorted(prompts.items())
        if batch == 1
    ]
    engine = tuple(
        EngineRow(
            batch=b,
            context=c,
            ttft_ms=_nearest(deep.prefill, c),
            measured_tpot_ms=deep.decode[b, c],
            predicted_tpot_ms=deep.layers * ms + head[b],
        )
        for (b, c), ms in sorted(layer.items())
    )
    return LayerProfile((*decode, *prefill), engine)


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


def _layers(
    shallow: Mapping[tuple[int, int], float],
    deep: Mapping[tuple[int, int], float],
    depths: tuple[int, int],
) -> dict[tuple[int, int], float]:
    return {
        point: layer_of_depths(shallow[point], deep[point], depths, str(point))
        for point in shallow.keys() & deep.keys()
    }


def _attention(tokens: int, prompts: Mapping[PrefillPoint, float]) -> float:
    """Of one prompt, in one layer; it grows with the square of the tokens."""
    found = [
        (whole - ms) / (1.0 - 1.0 / batch) * (tokens / size) ** 2
        for (batch, size), ms in prompts.items()
        if batch > 1 and (whole := prompts.get((1, size))) is not None
    ]
    return float(np.median(found)) if found else 0.0


def _nearest(prefill: Mapping[PrefillPoint, float], tokens: int) -> float:
    single = {size: ms for (batch, size), ms in prefill.items() if batch == 1}
    return single[min(single, key=lambda size: abs(size - tokens))]

"""From measured points to the rows of a layer table.

A point knows its layer's time as a whole; a table wants linear and attention parts.

- Decode: of one batch, the value at no context of the least-squares line over context is linear
  work, what is above it is attention.
- Prefill of n tokens behind c cached ones: attention is `a (n c + n^2 / 2)`. Every pair of points
  that differ only in the cached tokens, or in the number of prompts that share the same tokens,
  tells `a`; the median weighted by that work is taken.
- A mixed step's linear part is what is left without the attention of its decodes and its prompt.

Source: docs/formulation.md, section 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.perf.depths import NoisyProfileError, linear_of_batch, split_layer
from planner.perf.tables import LayerRow


@dataclass(frozen=True, slots=True)
class LayerPoint:
    """One layer's time, without communication."""

    kind: str  # 'decode' | 'prefill' | 'mixed'
    batch: int  # sequences; of a mixed step its decodes
    tokens: int  # new tokens of the step over all sequences
    context: int  # cached tokens of each (of a mixed step: of each decode)
    layer_ms: float


def whole_grid(found: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """What is left of points (x, y) when the lines with the most holes are taken out.

    A refinement that ran out of time leaves a line in part; a table has no holes.
    """
    kept = set(found)
    while kept:
        xs, ys = {x for x, _ in kept}, {y for _, y in kept}
        holes = [(x, y) for x in xs for y in ys if (x, y) not in kept]
        if not holes:
            break
        of_x = {x: sum(hole[0] == x for hole in holes) / len(ys) for x in xs}
        of_y = {y: sum(hole[1] == y for hole in holes) / len(xs) for y in ys}
        worst_x, worst_y = (max(of, key=lambda k: (of[k], k)) for of in (of_x, of_y))
        if of_x[worst_x] > of_y[worst_y]:  # times are straighter over y, the context
            kept = {(x, y) for x, y in kept if x != worst_x}
        else:
            kept = {(x, y) for x, y in kept if y != worst_y}
    return kept


def rows_of(
    points: Sequence[LayerPoint], head_ms: dict[int, float], source: str
) -> tuple[LayerRow, ...]:
    """Rows of one table, holes left out; `head_ms` by rows of logits.

    Raises NoisyProfileError: no decode or no prefill points.
    """
    decode = {(p.batch, p.context): p.layer_ms for p in points if p.kind == "decode"}
    decode = {key: decode[key] for key in whole_grid(decode)}
    prompts = [p for p in points if p.kind == "prefill"]
    if not decode or not any(p.batch == 1 and p.context == 0 for p in prompts):
        raise NoisyProfileError("a profile needs decode points, and prefill ones without context")
    linear = {batch: linear_of_batch(batch, decode) for batch, _ in decode}
    factor = attention_factor(prompts)
    prefill = whole_grid((p.tokens, p.context) for p in prompts if p.batch == 1)
    rows = [
        LayerRow("decode", b, b, c, *split_layer(ms, ms - linear[b]), _head(head_ms, b), source)
        for (b, c), ms in sorted(decode.items())
    ]
    for point in sorted(prompts, key=lambda p: (p.context, p.tokens)):
        if point.batch == 1 and (point.tokens, point.context) in prefill:
            n, c = point.tokens, point.context
            parts = split_layer(point.layer_ms, factor * (n * c + n * n / 2.0))
            rows.append(LayerRow("prefill", 1, n, c, *parts, _head(head_ms, 1), source))
    for point in points:
        if point.kind == "mixed":
            new = point.tokens - point.batch
            attention = _decode_attention(point, decode, linear) + factor * new * new / 2.0
            parts = split_layer(point.layer_ms, attention)
            rows.append(
                LayerRow("mixed", point.batch, point.tokens, point.context, *parts,
                         _head(head_ms, point.batch), source)
            )  # fmt: skip
    return tuple(rows)


def attention_factor(prompts: Sequence[LayerPoint]) -> float:
    """Milliseconds per `n c + n^2 / 2`."""
    whole = {p.tokens: p.layer_ms for p in prompts if p.batch == 1 and p.context == 0}
    found: list[tuple[float, float]] = []  # (factor, work that tells it)
    for point in prompts:
        if point.tokens not in whole:
            continue
        n, c, base = point.tokens, point.context, whole[point.tokens]
        if point.batch > 1 and c == 0:
            work = n * n / 2.0 * (1.0 - 1.0 / point.batch)
            found.append(((base - point.layer_ms) / work, work))
        elif point.batch == 1 and c > 0:
            found.append(((point.layer_ms - base) / (n * c), float(n * c)))
    if not found:
        return 0.0
    found.sort()
    reached = np.cumsum([work for _, work in found])
    return max(0.0, found[int(np.argmax(reached >= reached[-1] / 2.0))][0])


def _decode_attention(
    point: LayerPoint, decode: dict[tuple[int, int], float], linear: dict[int, float]
) -> float:
    """Of the decodes of a mixed step: in proportion to the KV of the nearest measured point."""
    b, c = min(decode, key=lambda key: abs(key[0] * key[1] - point.batch * point.context))
    attention = max(0.0, decode[b, c] - linear[b])
    return attention * point.batch * point.context / max(1, b * c)


def _head(head_ms: dict[int, float], rows: int) -> float:
    sizes = sorted(head_ms)
    return float(np.interp(rows, sizes, [head_ms[size] for size in sizes])) if sizes else 0.0

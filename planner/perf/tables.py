"""Measured tables of one layer (seed: layer_profiles.parquet), one per tensor parallel size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from planner.errors import MissingProfileError
from planner.perf.grids import Floats, Line, Surface
from planner.types import Provenance

LARGEST_FALL = 0.4  # of a time by more work, that still counts as noise


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One measured point of one layer; times in ms, communication left out."""

    phase: str  # 'prefill' | 'decode' | 'mixed'
    batch: int  # sequences; of a mixed step its decodes
    tokens: int  # new tokens in the step over all sequences
    context: int  # cached tokens of each sequence
    linear_ms: float  # GEMMs, experts and element-wise work
    attention_ms: float
    head_ms: float
    source: str


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Monotone interpolation of the rows of one (model, dtype, GPU, tensor parallel size)."""

    decode: Surface  # ms by (batch, context)
    decode_attention: Surface  # ms by (batch, context)
    mixed_linear: Line  # ms by tokens of a step, points of all kinds together
    prefill_linear: Line  # ms by tokens
    prefill_attention: Surface  # ms of one sequence by (tokens, context)
    head: Line  # ms by rows of logits
    provenance: Provenance
    source: str

    @classmethod
    def of(cls, name: str, rows: Sequence[LayerRow]) -> LayerTable:
        """Build from rows.

        Raises MissingProfileError: a phase has no rows, a time is not positive or falls by much
        as the work grows, or the grid has holes.
        """
        decode = [row for row in rows if row.phase == "decode"]
        # Rows of several sequences only shorten the attention part, which is summed by sequence.
        prefill = [row for row in rows if row.phase == "prefill" and row.batch == 1]
        mixed = [row for row in rows if row.phase == "mixed"]
        if not decode or not prefill:
            raise MissingProfileError(f"profile {name}: it needs both prefill and decode rows")
        for row in rows:
            if not all(math.isfinite(ms) and ms > 0 for ms in (row.linear_ms, row.attention_ms)):
                raise MissingProfileError(
                    f"profile {name}: every measured time must be positive, but {_point(row)} has "
                    f"{row.linear_ms:g} + {row.attention_ms:g} ms; measure it again or remove it"
                )
        _refuse_falls(name, decode, lambda row: (row.context, row.batch))
        _refuse_falls(name, prefill, lambda row: (row.context, row.tokens))
        try:
            decode_surface = Surface.of(
                [row.batch for row in decode],
                [row.context for row in decode],
                [row.linear_ms + row.attention_ms for row in decode],
            )
            decode_attention = Surface.of(
                [row.batch for row in decode],
                [row.context for row in decode],
                [row.attention_ms for row in decode],
            )
            attention = Surface.of(
                [row.tokens for row in prefill],
                [row.context for row in prefill],
                [row.attention_ms for row in prefill],
            )
        except ValueError as error:
            raise MissingProfileError(
                f"profile {name}: {error}; measure the missing points, or remove that table so "
                "that the roofline is used"
            ) from error
        hybrid = any("hybrid" in row.source for row in rows)
        return cls(
            decode=decode_surface,
            decode_attention=decode_attention,
            mixed_linear=Line.of(
                [row.tokens for row in (*decode, *prefill, *mixed)],
                [row.linear_ms for row in (*decode, *prefill, *mixed)],
            ),
            prefill_linear=Line.of([r.tokens for r in prefill], [r.linear_ms for r in prefill]),
            prefill_attention=attention,
            head=Line.of([r.batch for r in decode], [r.head_ms for r in decode]),
            provenance=Provenance.ESTIMATED if hybrid else Provenance.MEASURED,
            source=rows[0].source,
        )

    def decode_layer_ms(self, batch: Floats, context: Floats) -> Floats:
        return self.decode(batch, context)

    def decode_attention_ms(self, batch: Floats, context: Floats) -> Floats:
        return self.decode_attention(batch, context)

    def mixed_linear_ms(self, tokens: Floats) -> Floats:
        return self.mixed_linear(tokens)

    def prefill_linear_ms(self, tokens: Floats) -> Floats:
        return self.prefill_linear(tokens)

    def prefill_attention_ms(self, tokens: Floats, context: Floats) -> Floats:
        return self.prefill_attention(tokens, context)

    def head_ms(self, rows: Floats) -> Floats:
        return self.head(rows)


def _refuse_falls(
    name: str, rows: Sequence[LayerRow], order: Callable[[LayerRow], tuple[int, int]]
) -> None:
    """Noise is lifted to the running maximum; much less time for more work is a mistake.

    `order` gives what stays equal along a line of points, and what grows.
    """
    highest: dict[int, LayerRow] = {}
    for row in sorted(rows, key=order):
        line = order(row)[0]
        before = highest.get(line)
        if before is None or _layer_ms(row) >= _layer_ms(before):
            highest[line] = row
        elif _layer_ms(row) < LARGEST_FALL * _layer_ms(before):
            raise MissingProfileError(
                f"profile {name}: {_point(row)} takes {_layer_ms(row):.4g} ms, less work "
                f"({_point(before)}) {_layer_ms(before):.4g} ms; measure them again or remove them"
            )


def _layer_ms(row: LayerRow) -> float:
    return row.linear_ms + row.attention_ms


def _point(row: LayerRow) -> str:
    return f"{row.phase} of batch {row.batch}, {row.tokens} tokens, context {row.context}"


TableKey = tuple[str, str, str, int]  # model, dtype, GPU profile name, tensor parallel size


def group_rows(
    rows: Sequence[tuple[TableKey, LayerRow]],
) -> Mapping[TableKey, list[LayerRow]]:
    """Rows by the table they belong to."""
    grouped: dict[TableKey, list[LayerRow]] = {}
    for key, row in rows:
        grouped.setdefault(key, []).append(row)
    return grouped

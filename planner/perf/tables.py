"""Measured tables of one layer (seed: layer_profiles.parquet), one per tensor parallel size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.errors import MissingProfileError
from planner.perf.grids import Floats, Line, Surface
from planner.types import Provenance


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One measured point of one layer; times in ms, communication left out."""

    phase: str  # 'prefill' | 'decode'
    batch: int
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
    mixed_linear: Line  # ms by tokens of a step, decode and prefill points together
    prefill_linear: Line  # ms by tokens
    prefill_attention: Surface  # ms of one sequence by (tokens, context)
    head: Line  # ms by rows of logits
    provenance: Provenance
    source: str

    @classmethod
    def of(cls, name: str, rows: Sequence[LayerRow]) -> LayerTable:
        """Build from rows.

        Raises MissingProfileError: a phase has no rows, a time is not positive, or the grid
        has holes.
        """
        decode = [row for row in rows if row.phase == "decode"]
        # Rows of several sequences only shorten the attention part, which is summed by sequence.
        prefill = [row for row in rows if row.phase == "prefill" and row.batch == 1]
        if not decode or not prefill:
            raise MissingProfileError(f"profile {name}: it needs both prefill and decode rows")
        if any(row.linear_ms <= 0 or row.attention_ms <= 0 for row in rows):
            raise MissingProfileError(f"profile {name}: every measured time must be positive")
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
            raise MissingProfileError(f"profile {name}: {error}") from error
        hybrid = any("hybrid" in row.source for row in rows)
        return cls(
            decode=decode_surface,
            decode_attention=decode_attention,
            mixed_linear=Line.of(
                [row.tokens for row in (*decode, *prefill)],
                [row.linear_ms for row in (*decode, *prefill)],
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


TableKey = tuple[str, str, str, int]  # model, dtype, GPU profile name, tensor parallel size


def group_rows(
    rows: Sequence[tuple[TableKey, LayerRow]],
) -> Mapping[TableKey, list[LayerRow]]:
    """Rows by the table they belong to."""
    grouped: dict[TableKey, list[LayerRow]] = {}
    for key, row in rows:
        grouped.setdefault(key, []).append(row)
    return grouped

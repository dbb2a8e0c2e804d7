"""A table's contradictions: small falls are lifted, steep ones refused, outliers named.

More work never takes less time, so along a line of growing work a time below an earlier one is
either noise (lifted to it) or a mistake (refused, `planner.perf.tables`). An outlier is a point
that stands above the line between its neighbours, or below it, by more than `OUTLIER`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.perf.tables import LayerRow, LayerTable

OUTLIER = 0.25
Order = Callable[[LayerRow], tuple[int, int]]  # what stays equal along a line, and what grows


@dataclass(frozen=True, slots=True)
class Repaired:
    """Rows that never fall, and what was said about them."""

    rows: tuple[LayerRow, ...]
    lifted: tuple[str, ...]
    outliers: tuple[str, ...]


def repair(name: str, rows: Sequence[LayerRow]) -> Repaired:
    """Lift small falls and name outliers.

    Raises MissingProfileError: rows that no repair makes a table of, with the row named.
    """
    LayerTable.of(name, rows)  # refuses what is steep, zero, or leaves holes
    lifted: list[str] = []
    outliers: list[str] = []
    kept = list(rows)
    for phase, order in _LINES:
        for line in _lines(kept, phase, order):
            outliers += _outliers(kept, line, order)
            lifted += _lift(kept, line, order)
    return Repaired(tuple(kept), tuple(lifted), tuple(outliers))


_LINES: tuple[tuple[str, Order], ...] = (
    ("decode", lambda row: (row.context, row.batch)),
    ("decode", lambda row: (row.batch, row.context)),
    ("prefill", lambda row: (row.context, row.tokens)),
    ("prefill", lambda row: (row.tokens, row.context)),
)


def _lines(rows: Sequence[LayerRow], phase: str, order: Order) -> list[list[int]]:
    """Positions of the rows of each line, in order of their work."""
    mine = [n for n, row in enumerate(rows) if row.phase == phase and _is_single(row)]
    lines: dict[int, list[int]] = {}
    for n in sorted(mine, key=lambda n: order(rows[n])):
        lines.setdefault(order(rows[n])[0], []).append(n)
    return list(lines.values())


def _is_single(row: LayerRow) -> bool:
    return row.phase == "decode" or row.batch == 1


def _lift(rows: list[LayerRow], line: Sequence[int], order: Order) -> list[str]:
    found = []
    for before, here in itertools.pairwise(line):
        low, high = _ms(rows[here]), _ms(rows[before])
        if low < high and order(rows[here])[1] > order(rows[before])[1]:
            scale = high / low
            row = rows[here]
            rows[here] = replace(
                row, linear_ms=row.linear_ms * scale, attention_ms=row.attention_ms * scale
            )
            found.append(f"{describe(row)}: {low:.4g} ms lifted to {high:.4g}")
    return found


def _outliers(rows: Sequence[LayerRow], line: Sequence[int], order: Order) -> list[str]:
    found = []
    for a, b, c in zip(line, line[1:], line[2:], strict=False):
        x0, x1, x2 = (order(rows[n])[1] for n in (a, b, c))
        if not x0 < x1 < x2:
            continue
        between = _ms(rows[a]) + (x1 - x0) / (x2 - x0) * (_ms(rows[c]) - _ms(rows[a]))
        off = _ms(rows[b]) / between - 1.0
        if abs(off) > OUTLIER:
            found.append(f"{describe(rows[b])}: {off:+.0%} from its neighbours")
    return found


def _ms(row: LayerRow) -> float:
    return row.linear_ms + row.attention_ms


def describe(row: LayerRow) -> str:
    """A row in words."""
    return f"{row.phase} of batch {row.batch}, {row.tokens} tokens, context {row.context}"

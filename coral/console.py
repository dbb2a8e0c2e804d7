"""Tables and the console that they are printed on; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def make_console(width: int = 160) -> Console:
    """Standard output; of a width of its own where it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def print_rows(columns: Sequence[str], rows: Sequence[tuple[object, ...]]) -> None:
    """A query's result."""
    console = make_console(width=1000)  # a pipe has no edge: never fold a cell
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else _cell(value) for value in row))
    console.print(table)
    console.print(f"{len(rows)} rows")


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)

"""Progress bars on a terminal; silence elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from tasks import progress


@contextmanager
def progress_bars() -> Iterator[None]:
    """Show what long work reports, on stderr."""
    console = Console(stderr=True)
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    known: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in known:
            known[what] = bars.add_task(what, total=total)
        bars.update(known[what], completed=done, total=total)

    with bars, progress.watched_by(show):
        yield

"""Progress of long work, to whoever watches: flows take no callbacks as parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Report = Callable[[str, int, int], None]  # what, done, total

_watcher: ContextVar[Report | None] = ContextVar("coral_progress", default=None)


def report(what: str, done: int, total: int) -> None:
    """Tell the watcher, if there is one."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(what, done, total)


@contextmanager
def watched_by(watcher: Report) -> Iterator[None]:
    """Send progress to `watcher` inside the block."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)

"""A clock that stands still while an engine's thread waits for a core that others have.

On a machine that others work on too, a step of 10 ms on the cores may take 15 on the wall. Linux
counts how long each thread was ready and not running; that is taken off, and its share is kept.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FIND_EVERY_S = 2.0
WORKER = "VLLM::Worker"  # does the work; vLLM's other processes poll for it


class Clock:
    """Milliseconds of work, by the busiest thread of the worker (or of all processes)."""

    def __init__(self) -> None:
        self._thread: Path | None = None
        self._ran_s: dict[Path, float] = {}
        self._found_at = -FIND_EVERY_S
        self._offset_s = 0.0

    def find(self) -> None:
        """Look again which thread is the busiest; not while something is timed."""
        if time.monotonic() - self._found_at < FIND_EVERY_S:
            return
        self._found_at = time.monotonic()
        before = self.waited_s()
        pids = [os.getpid(), *_descendants(os.getpid())]
        pids = [pid for pid in pids if _name(pid).startswith(WORKER)] or pids
        threads = [task for pid in pids for task in _tasks(pid)]
        ran = {task: _schedstat(task)[0] for task in threads}
        # Since the last look: what compiled the model at the start may have run longest of all.
        since = {task: ran[task] - self._ran_s.get(task, 0.0) for task in threads}
        self._thread = max(threads, key=lambda task: since[task], default=None)
        self._ran_s = ran
        self._offset_s = 0.0
        self._offset_s = before - self.waited_s()  # goes on where it was

    def waited_s(self) -> float:
        """In all."""
        return self._offset_s + (_schedstat(self._thread)[1] if self._thread else 0.0)

    def ms(self) -> float:
        """Now."""
        return 1e3 * (time.perf_counter() - self.waited_s())


def _schedstat(task: Path) -> tuple[float, float]:
    """Seconds that a thread ran, and that it waited; zeros where nobody counts them."""
    try:
        ran, waited, _ = (task / "schedstat").read_text().split()
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    found = []
    for task in _tasks(pid):
        try:
            children = [int(one) for one in (task / "children").read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found

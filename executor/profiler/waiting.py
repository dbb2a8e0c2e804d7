"""Times engine steps where they happen, less what the engine's thread waited for a core.

An engine runs in a process of its own and stamps what each step gave (CLOCK_MONOTONIC, the same for
all processes). The stamps count, not when an answer was read: on a busy machine answers pile up,
and read at once they would look like steps of no length.

Where others work too, a step of 10 ms on the cores may take 15 on the wall. Linux counts how long
each thread was ready and not running. That is looked at whenever an answer is read, and between two
looks it is taken to pass evenly.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIND_EVERY_S = 2.0
WORKER = "VLLM::Worker"  # does the work; vLLM's other processes poll for it


class Clock:
    """Milliseconds of work, by the busiest thread of the worker (or of all processes)."""

    def __init__(self) -> None:
        self.step_ended = 0.0  # when the last step whose answers were read had ended
        self._thread: Path | None = None
        self._ran_s: dict[Path, float] = {}
        self._found_at = -FIND_EVERY_S
        self._offset_s = 0.0
        self._looks: tuple[list[float], list[float]] = ([], [])  # times, seconds waited

    def watch(self, engine_core: Any) -> None:
        """Note the stamp of all that an engine's client reads."""
        read: Callable[[], Any] = engine_core.get_output

        def get_output() -> Any:
            found = read()
            self.step_ended = found.timestamp
            self.now()
            return found

        engine_core.get_output = get_output

    def now(self) -> float:
        """Seconds, on the clock of the stamps."""
        now = time.monotonic()
        times, waited = self._looks
        times.append(now)
        waited.append(self.waited_s())
        return now

    def work_ms(self, start: float, end: float) -> float:
        """Between two moments, waiting taken off."""
        return 1e3 * (end - start - (self._waited_at(end) - self._waited_at(start)))

    def _waited_at(self, moment: float) -> float:
        times, waited = self._looks
        after = bisect_right(times, moment)
        if after in {0, len(times)}:  # not between two looks
            return waited[min(after, len(times) - 1)] if times else 0.0
        before = after - 1
        share = (moment - times[before]) / (times[after] - times[before])
        return waited[before] + share * (waited[after] - waited[before])

    def find(self) -> None:
        """Before something is timed: forget the looks, see again which thread is the busiest."""
        self._looks = ([], [])
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

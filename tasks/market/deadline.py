"""Calls side by side, a bounded number at a time, cut off at a deadline."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from queue import Empty, SimpleQueue
from typing import TypeVar

from planner.errors import CoralError

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class DeadlineError(CoralError):
    """No answer in time."""


def run_all(
    calls: Mapping[Key, Callable[[], Value]],
    workers: int,
    until: float,
    ended_one: Callable[[Key, Value | Exception], None] = lambda *_: None,
) -> dict[Key, Value | Exception]:
    """What every call returned or raised; DeadlineError for those that did not end in time.

    `until` is of time.monotonic(). Calls that hang are left to daemon threads: they hold nobody up.
    `ended_one` is called in the caller's thread as each ends.
    """
    waiting: SimpleQueue[Key] = SimpleQueue()
    ended: SimpleQueue[tuple[Key, Value | Exception]] = SimpleQueue()
    for key in calls:
        waiting.put(key)

    def work() -> None:
        while time.monotonic() < until:
            try:
                key = waiting.get_nowait()
            except Empty:
                return
            try:
                ended.put((key, calls[key]()))
            except Exception as error:
                ended.put((key, error))

    for _ in range(min(workers, len(calls))):
        context = contextvars.copy_context()  # progress reaches who watches the caller
        threading.Thread(target=context.run, args=(work,), daemon=True).start()
    found: dict[Key, Value | Exception] = {}
    while len(found) < len(calls):
        try:
            key, value = ended.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            break
        found[key] = value
        ended_one(key, value)
    late = DeadlineError("no answer before the deadline")
    return {key: found.get(key, late) for key in calls}

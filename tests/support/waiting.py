"""Waits of what only moves when it is stepped."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Stepped(Protocol):
    """A controller, or what has one."""

    def step(self, seconds: float) -> None: ...


Until = Callable[..., bool]


def until_within(default_s: float) -> Until:
    """A wait for a condition of something stepped, that long where nothing else is asked."""

    def until(stepped: Stepped, condition: Callable[[], bool], seconds: float = default_s) -> bool:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            stepped.step(0.1)
            if condition():
                return True
        return False

    return until

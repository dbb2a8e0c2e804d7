"""Ctrl-C: stop at once, with everything that was started.

A terminal sends the interrupt to every process of the command: Prefect's temporary server dies
with it, and a flow that then tries to report its end waits for minutes. Every write is one
database transaction, so stopping anywhere leaves nothing half-written.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import psutil

MESSAGE = "coral: interrupted; what was solved is stored, run it again to go on"


def stop_on_interrupt() -> None:
    """Exit 130 on the first interrupt, taking child processes along."""
    signal.signal(signal.SIGINT, _stop)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    show_cursor = "\033[?25h" if sys.stderr.isatty() else ""  # a progress bar hid it
    os.write(sys.stderr.fileno(), f"{show_cursor}\n{MESSAGE}\n".lstrip("\n").encode())
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(130)

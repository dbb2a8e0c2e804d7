"""Ends what a killed agent leaves: its processes' own children, which the kernel does not.

    python -m executor.control.guard

The agent holds the other end of stdin and names each process that it started: `+123`, and `-123`
once nothing of it is left. At the end of the input the agent is gone, and the guard kills the
sessions that are still named.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

MODULE = "executor.control.guard"


def main() -> None:
    """Listen until the agent is gone."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        word = line.strip()
        if word.startswith("+"):
            sessions.add(int(word[1:]))
        elif word.startswith("-"):
            sessions.discard(int(word[1:]))
    for session in sessions:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGKILL)


if __name__ == "__main__":
    main()

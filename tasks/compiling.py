"""Compile the simulator's kernels in a process of their own while something else goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from simulator.warm import is_compiled


@contextmanager
def compiling_aside() -> Iterator[None]:
    """Have them ready at the end of the block; nothing to do where they were compiled before.

    Whatever goes wrong there goes wrong again, and is said, where they are used.
    """
    if is_compiled():
        yield
        return
    command = [sys.executable, "-m", "simulator.warm"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        except BaseException:
            process.terminate()
            raise

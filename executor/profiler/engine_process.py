"""The process of an engine, from outside: started, asked, watched, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

START = Path(__file__).with_name("start.py")
# Ends an engine whose profiler is gone, however it went: a stopped engine would notice nothing.
GUARD = (
    "import os, signal, sys\n"
    "sys.stdin.read()\n"
    "try: os.killpg(int(sys.argv[1]), signal.SIGKILL)\n"
    "except OSError: pass\n"
)


class EngineError(Exception):
    """An engine did not start, or ended."""


class EngineProcess:
    """One engine, asked line by line."""

    def __init__(self, settings: dict[str, Any], environment: dict[str, str], log: IO[str]) -> None:
        self.layers = settings["layers"]
        self.process = subprocess.Popen(
            [sys.executable, str(START), "--engine", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
        self.kernels = ""
        self._guard = subprocess.Popen(
            [sys.executable, "-S", "-c", GUARD, str(self.process.pid)],
            stdin=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def wait_ready(self) -> None:
        """Raises EngineError: it ended before."""
        if self.kernels:
            return
        self.kernels = self._answer()["kernels"]
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """With all that it started."""
        self._signal(signal.SIGKILL)  # it holds nothing that is worth an orderly end
        self.process.wait()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def ask_once(self, do: str, **values: Any) -> dict[str, Any]:
        """What came back, with the share of the time that its thread waited for a core."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise EngineError(f"the engine of {self.layers} layers ended") from error
        found = self._answer()
        self._signal(signal.SIGSTOP)  # its workers would poll on the cores of the other engine
        return found

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EngineError(
                f"the engine of {self.layers} layers ended with exit code {self.process.wait()}"
            )
        found: dict[str, Any] = json.loads(line)
        return found

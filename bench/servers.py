"""Processes of engines that a benchmark starts, waits for and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

Command = tuple[Sequence[str | Path], Mapping[str, str]]  # with what its environment has besides


@contextmanager
def running(
    commands: Sequence[Command], url: str, log: Path, ready_s: float
) -> Iterator[list[int]]:
    """Their process ids, once the URL answers; all that they started ends with the block."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("w") as out:
            for argv, environment in commands:
                started.append(
                    subprocess.Popen(
                        argv, env={**os.environ, **environment}, stdout=out, stderr=out,
                        start_new_session=True,
                    )
                )  # fmt: skip
        ends = time.monotonic() + ready_s
        while not _answers(url):
            if time.monotonic() > ends or any(one.poll() is not None for one in started):
                raise SystemExit(f"it does not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield [one.pid for one in started]
    finally:
        for one in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK
    return False

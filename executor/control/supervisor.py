"""The processes of one node: started, watched and ended, whatever the controller does.

A replica's processes on the node live and die together: when one exits by itself, the others are
ended at once and the replica stays failed until it is started again. Health endpoints are not
asked: vLLM answers them while a remote stage is dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from executor.control.messages import ProcessReport, ProcessState
from executor.stage_plan import ProcessPlan

KILL_AFTER_S = 5.0  # of processes whose replica has failed already
PR_SET_PDEATHSIG = 1


@dataclass
class _Running:
    plan: ProcessPlan
    generation: int
    process: subprocess.Popen[bytes]
    log: Path
    stopped: bool = False

    def report(self, replica_id: str) -> ProcessReport:
        code = self.process.poll()
        state = ProcessState.RUNNING
        if code is not None:
            state = ProcessState.STOPPED if self.stopped else ProcessState.EXITED
        return ProcessReport(
            replica_id, self.generation, self.plan.name, state, self.process.pid, code
        )


class Supervisor:
    """Processes by replica; logs go to a folder, one file per process. Nothing here waits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._replicas: dict[str, list[_Running]] = {}
        self._ending: dict[str, threading.Thread] = {}

    def start(self, replica_id: str, generation: int, processes: Sequence[ProcessPlan]) -> None:
        """Start a replica's processes of this node; an older generation is killed first.

        The same generation again changes nothing. A command that can't be started counts as one
        that exited at once.
        """
        known = self._replicas.get(replica_id, [])
        if known and known[0].generation >= generation:
            return
        _end([one.process for one in known], 0.0)
        self.folder.mkdir(parents=True, exist_ok=True)
        started = self._replicas[replica_id] = []
        for plan in processes:
            log = self.folder / f"{replica_id}-{plan.name}.log"
            started.append(_Running(plan, generation, _spawn(plan, log), log))

    def stop(self, replica_id: str, grace_s: float) -> None:
        """End a replica's processes: asked first, killed after the grace."""
        for one in self._replicas.get(replica_id, []):
            one.stopped = one.stopped or one.process.poll() is None
        self._end_soon(replica_id, grace_s)

    def watch(self) -> tuple[ProcessReport, ...]:
        """How all processes are; what is left of a failed replica is ended."""
        reports = []
        for replica_id, running in sorted(self._replicas.items()):
            reports += [one.report(replica_id) for one in running]
            if any(one.process.poll() is not None and not one.stopped for one in running):
                self._end_soon(replica_id, KILL_AFTER_S)
        return tuple(reports)

    def _end_soon(self, replica_id: str, grace_s: float) -> None:
        """In a thread: a drain takes a minute, and reports must go on."""
        busy = self._ending.get(replica_id)
        alive = [one.process for one in self._replicas.get(replica_id, [])]
        if not any(process.poll() is None for process in alive) or (
            busy is not None and busy.is_alive() and grace_s > 0
        ):
            return
        self._ending[replica_id] = threading.Thread(target=_end, args=(alive, grace_s), daemon=True)
        self._ending[replica_id].start()

    def log(self, replica_id: str, name: str, lines: int) -> str:
        """The last lines of a process's log; empty where there is none."""
        for one in self._replicas.get(replica_id, []):
            if one.plan.name == name and one.log.exists():
                text = one.log.read_text(errors="replace")
                return "\n".join(text.splitlines()[-lines:])
        return ""

    def stop_all(self, grace_s: float) -> None:
        """End everything."""
        processes = [one for running in self._replicas.values() for one in running]
        for one in processes:
            one.stopped = True
        _end([one.process for one in processes], grace_s)


def _spawn(plan: ProcessPlan, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **plan.environment}
    with log.open("ab") as output:
        try:
            return subprocess.Popen(
                plan.argv, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_the_agent,
            )  # fmt: skip
        except OSError as error:
            output.write(f"cannot start {plan.argv[0]}: {error}\n".encode())
            return subprocess.Popen(["false"])


def _die_with_the_agent() -> None:
    """The kernel kills this process when the agent dies, however it does (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(processes: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """SIGTERM to each, then SIGKILL to it and to all that it started."""
    families: Mapping[int, list[psutil.Process]] = {p.pid: _family(p.pid) for p in processes}
    for process in processes:
        if process.poll() is None:
            process.terminate()
    ends = time.monotonic() + grace_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, ends - time.monotonic()))
    for process in processes:
        for member in (*families[process.pid], *_family(process.pid)):
            with contextlib.suppress(psutil.Error):
                member.kill()
        process.wait()


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []

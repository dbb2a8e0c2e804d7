"""The processes of one node: started, watched and ended, whatever the controller does.

A replica's processes on the node live and die together: when one exits by itself, the others are
ended at once and the replica stays failed until it is started again. Health endpoints are not
asked: vLLM answers them while a remote stage is dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.control import guard
from executor.control.messages import ProcessReport, ProcessState
from executor.processes import die_with_parent
from executor.stage_plan import ProcessPlan

KILL_AFTER_S = 5.0  # of processes whose replica has failed already


@dataclass
class _Running:
    plan: ProcessPlan
    digest: str
    generation: int
    process: subprocess.Popen[bytes]
    log: Path
    stopped: bool = False
    cleared: bool = False  # nothing of it is left; its ids may be others' by now

    def report(self, replica_id: str) -> ProcessReport:
        code = self.process.poll()
        state = ProcessState.RUNNING
        if code is not None:
            state = ProcessState.STOPPED if self.stopped else ProcessState.EXITED
        return ProcessReport(
            replica_id, self.digest, self.generation, self.plan.name, state, self.process.pid, code,
            self._prepared_s(),
        )  # fmt: skip

    def _prepared_s(self) -> float | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return float(json.loads(_record(self.log).read_text())["seconds"])
        return None


class _Guard:
    """The process that ends what a killed agent leaves; started with the first thing to guard."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._named: set[int] = set()
        self._lock = threading.Lock()

    def name(self, session: int) -> None:
        """One more."""
        with self._lock:
            self._named.add(session)
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", guard.MODULE],
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
                self._write("".join(f"+{one}\n" for one in sorted(self._named)))
            else:
                self._write(f"+{session}\n")

    def forget(self, session: int) -> None:
        """Nothing of it is left; its number may be another's by now."""
        with self._lock:
            self._named.discard(session)
            self._write(f"-{session}\n")

    def _write(self, text: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(text.encode())
                self._process.stdin.flush()


class Supervisor:
    """Processes by replica; logs go to a folder, one file per process. Nothing here waits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._guard = _Guard()
        self._replicas: dict[str, list[_Running]] = {}
        self._ending: dict[str, threading.Thread] = {}

    def start(
        self, replica_id: str, digest: str, generation: int, processes: Sequence[ProcessPlan]
    ) -> None:
        """Start a replica's processes of this node; an older generation is killed first.

        The same generation again changes nothing. A command that can't be started counts as one
        that exited at once.
        """
        known = self._replicas.get(replica_id, [])
        if known and known[0].generation >= generation:
            return
        self._end(known, 0.0)
        self.folder.mkdir(parents=True, exist_ok=True)
        started = self._replicas[replica_id] = []
        for plan in processes:
            log = self.folder / f"{replica_id}-{plan.name}.log"
            process = _spawn(plan, log)
            self._guard.name(process.pid)
            started.append(_Running(plan, digest, generation, process, log))

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
        running = self._replicas.get(replica_id, [])
        if all(one.cleared for one in running) or (
            busy is not None and busy.is_alive() and grace_s > 0
        ):
            return
        ending = threading.Thread(target=self._end, args=(list(running), grace_s), daemon=True)
        self._ending[replica_id] = ending
        ending.start()

    def log(self, replica_id: str, name: str, lines: int) -> str:
        """The last lines of a process's log; empty where there is none."""
        for one in self._replicas.get(replica_id, []):
            if one.plan.name == name and one.log.exists():
                text = one.log.read_text(errors="replace")
                return "\n".join(text.splitlines()[-lines:])
        return ""

    def stop_all(self, grace_s: float) -> None:
        """End everything."""
        every = [one for running in self._replicas.values() for one in running]
        for one in every:
            one.stopped = True
        self._end(every, grace_s)

    def _end(self, running: Sequence[_Running], grace_s: float) -> None:
        """SIGTERM to each, then SIGKILL to its whole session: workers outlive a main process."""
        left = [one for one in running if not one.cleared]
        for one in left:
            if one.process.poll() is None:
                one.process.terminate()
        ends = time.monotonic() + grace_s
        for one in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.0, ends - time.monotonic()))
        for one in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()
            one.cleared = True
            self._guard.forget(one.process.pid)


def _spawn(plan: ProcessPlan, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **plan.environment}
    argv = plan.argv
    if plan.prepare:
        record = _record(log)
        record.unlink(missing_ok=True)
        prepare = (*plan.prepare, "--record", str(record))
        argv = (sys.executable, "-m", "coral", *prepare, "--", *plan.argv)
    with log.open("ab") as output:
        try:
            return subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        except OSError as error:
            output.write(f"cannot start {plan.argv[0]}: {error}\n".encode())
            return subprocess.Popen(["false"], start_new_session=True)


def _record(log: Path) -> Path:
    """Where preparing says how long it took."""
    return log.with_suffix(".prepared")

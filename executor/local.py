"""The local fleet: nodes are agents, as processes on this machine.

An agent is found again by what its file says (process id and start time), so that launching a
lease twice gives one agent and a controller that was killed knows its nodes when it comes back.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from executor.home import HomeFiles
from planner.errors import InputError
from planner.leases import Lease

FIRST_LEASE_S = 120.0
END_S = 20.0  # of an agent that is asked to end, its processes included


class NoControllerError(InputError):
    """No controller runs on this home."""


@dataclass(frozen=True, slots=True)
class LocalFleet:
    """Agents of one home."""

    home: Path

    def launch(self, lease: Lease, now: datetime) -> tuple[str, datetime]:
        """Start the lease's agent, if it does not run; it is ready at once.

        Raises NoControllerError: agents could connect to nobody.
        """
        found = self._agent(lease.id)
        if found is None:
            found = self._start(lease.id)
        return f"local-{found.pid}-{found.create_time()}", now

    def terminate(self, instance_id: str) -> None:
        """End an agent with all that it runs; one that is gone is quiet."""
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            _, pid, created = instance_id.split("-")
            process = psutil.Process(int(pid))
            if process.create_time() == float(created):
                process.terminate()
                with contextlib.suppress(psutil.TimeoutExpired):
                    process.wait(END_S)
                process.kill()

    def public_key(self, lease_id: str) -> str:
        """Of a lease; its keys are made when first asked for."""
        return HomeFiles(self.home).lease_keys(lease_id).public

    def _start(self, lease_id: str) -> psutil.Process:
        files = HomeFiles(self.home)
        try:
            known = json.loads(files.controller.read_text())
        except (OSError, ValueError) as error:
            raise NoControllerError(
                f"no controller runs on {self.home}; start one with `coral controller`"
            ) from error
        files.lease_keys(lease_id)
        folder = self.home / "agents" / lease_id
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", "coral", "agent", "--lease", lease_id,
            "--controller", known["address"], "--controller-key", known["public_key"],
            "--key-file", str(files.keys / f"lease-{lease_id}.key"), "--folder", str(folder),
            "--first-lease", str(FIRST_LEASE_S),
        ]  # fmt: skip
        with (folder / "agent.log").open("ab") as log:
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        process = psutil.Process(started.pid)
        self._file(lease_id).write_text(
            json.dumps({"pid": process.pid, "created": process.create_time()})
        )
        return process

    def _agent(self, lease_id: str) -> psutil.Process | None:
        """The lease's agent, if it runs."""
        with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
            known = json.loads(self._file(lease_id).read_text())
            process = psutil.Process(known["pid"])
            if process.create_time() == known["created"]:
                return None if process.status() == psutil.STATUS_ZOMBIE else process
        return None

    def _file(self, lease_id: str) -> Path:
        return self.home / "agents" / lease_id / "agent.json"

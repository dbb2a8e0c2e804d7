"""The local fleet: nodes are agents, as processes on this machine.

An agent is found again by what its file says (process id and start time), so that launching a
lease twice gives one agent and a controller that was killed knows its nodes when it comes back.
The file also says which of the machine's node slots the lease has: cores and ports of its own.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from executor.control import guard
from executor.control.controller import DRAIN_S
from executor.deployment import Deployment, withdraw, write_deployment
from executor.fleet import Launched, NoCapacityError, launch_in_words
from executor.home import HomeFiles
from executor.stage_plan import PORTS_PER_GROUP
from planner.catch_up import Instance, InstanceState
from planner.errors import InputError
from planner.leases import Lease

FIRST_LEASE_S = 120.0
LEAVE_S = DRAIN_S + 25.0  # of an agent whose lease the deployment no longer names
IDLE_LEAVE_S = 5.0  # the same once nothing runs on it: it may never have reached the controller
END_S = 20.0  # of an agent that is asked to end, its processes included
PORTS = range(20000, 32000)  # below those that Linux gives to outgoing connections
ADDRESS = "127.0.0.1"
LOCAL_PREFIX = "local-"

Cores = tuple[str, ...]  # of every group of a node


class NoControllerError(InputError):
    """No controller runs on this home."""


class NoPortsError(InputError):
    """All ports that nodes may have are taken."""


@dataclass(frozen=True, slots=True)
class Slot:
    """What a lease has of this machine."""

    instance_type: str
    index: int  # among the nodes of its type
    first_port: int
    cores: Cores


@dataclass(frozen=True)
class LocalFleet:
    """Agents of one home; `nodes` has the cores of every node by instance type."""

    home: Path
    nodes: Mapping[str, tuple[Cores, ...]] = field(default_factory=dict)
    kind: str = "local"
    at_once: int = 1
    drain_s: float = 0.0
    drains: bool = True  # what is terminated finishes what it serves

    @property
    def files(self) -> HomeFiles:
        return HomeFiles(self.home)

    def launch(self, lease: Lease, now: datetime) -> Launched:
        """Start the lease's agent, if it does not run; it is ready at once.

        Raises NoControllerError: agents could connect to nobody. NoCapacityError: other leases have
        all nodes of that type.
        """
        found = self._agent(lease.id)
        if found is None:
            found = self._start(lease.id, self._free_slot(lease))
        return Launched(_instance_id(found.pid, found.create_time(), lease.id), now)

    def terminate(self, instance_id: str) -> None:
        """End an agent with all that it runs; one that is gone is quiet.

        The controller lets it drain and leave once the deployment does not name its lease; it is
        killed where it does not, or where no controller runs.
        """
        found = _process(instance_id)
        if found is None:
            return
        withdraw(self.files.deployment, instance_id.split("-", 3)[3])
        if self.drains and self.controller() is not None and _leaves(found):
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            found.terminate()
            if not _ends(found, END_S):
                found.kill()

    def instances(self, now: datetime) -> list[Instance]:
        """The agents of this home, by their files; those that do not run are gone."""
        found = []
        for lease_id in self._lease_ids():
            with contextlib.suppress(OSError, ValueError, KeyError):
                known = json.loads(self._file(lease_id).read_text())
                lives = _alive(known["pid"], known["created"]) is not None
                found.append(
                    Instance(
                        _instance_id(known["pid"], known["created"], lease_id),
                        lease_id,
                        InstanceState.RUNNING if lives else InstanceState.GONE,
                        datetime.fromtimestamp(known["created"], now.tzinfo),
                    )
                )
        return found

    def elsewhere(self, lease: Lease) -> str | None:
        """None: there is one machine."""
        return None

    def calls(self, lease: Lease) -> list[str]:
        """One."""
        return [launch_in_words(lease)]

    def clear(self) -> None:
        """Deploy nothing: every agent drains and leaves."""
        write_deployment(self.files.deployment, Deployment())

    def public_key(self, lease_id: str) -> str:
        """Of a lease; its keys are made when first asked for."""
        return self.files.lease_keys(lease_id).public

    def slot(self, lease_id: str) -> Slot | None:
        """Where a lease's processes run; None where its agent does not run, or has no slot."""
        if self._agent(lease_id) is None:
            return None
        known = json.loads(self._file(lease_id).read_text()).get("slot")
        return Slot(**{**known, "cores": tuple(known["cores"])}) if known else None

    def controller(self) -> Mapping[str, Any] | None:
        """What the home's controller says of itself, if it runs."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(self.files.controller.read_text())
            if psutil.pid_exists(known["pid"]):
                return dict(known)
        return None

    def require_controller(self) -> Mapping[str, Any]:
        """As `controller`.

        Raises NoControllerError.
        """
        found = self.controller()
        if found is None:
            raise NoControllerError(
                f"no controller runs on {self.home}; start one with `coral controller`"
            )
        return found

    def _free_slot(self, lease: Lease) -> Slot | None:
        nodes = self.nodes.get(lease.instance_type)
        if nodes is None:  # a node without cores and ports of its own
            return None
        taken = [slot for slot in map(self.slot, self._lease_ids()) if slot is not None]
        used = {slot.index for slot in taken if slot.instance_type == lease.instance_type}
        free = [index for index in range(len(nodes)) if index not in used]
        if not free:
            raise NoCapacityError(
                f"all {len(nodes)} nodes of type {lease.instance_type} of this machine are in use"
            )
        cores = nodes[free[0]]
        port = self._free_ports(len(cores) * PORTS_PER_GROUP, taken)
        return Slot(lease.instance_type, free[0], port, cores)

    def _free_ports(self, count: int, taken: list[Slot]) -> int:
        """The first of so many ports in a row that nobody has; homes begin at different ones."""
        used = {
            port
            for slot in taken
            for port in range(slot.first_port, slot.first_port + len(slot.cores) * PORTS_PER_GROUP)
        }
        places = len(PORTS) // count
        begin = zlib.crc32(str(self.home).encode()) % places
        for number in range(places):
            first = PORTS.start + (begin + number) % places * count
            ports = range(first, first + count)
            if used.isdisjoint(ports) and all(map(_is_free, ports)):
                return first
        raise NoPortsError(f"no {count} free ports in a row in {PORTS.start} to {PORTS.stop - 1}")

    def _start(self, lease_id: str, slot: Slot | None) -> psutil.Process:
        files, known = self.files, self.require_controller()
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
        content: dict[str, Any] = {"pid": process.pid, "created": process.create_time()}
        if slot is not None:
            content["slot"] = asdict(slot)
        self._file(lease_id).write_text(json.dumps(content))
        return process

    def _lease_ids(self) -> list[str]:
        return [file.parent.name for file in (self.home / "agents").glob("*/agent.json")]

    def _agent(self, lease_id: str) -> psutil.Process | None:
        """The lease's agent, if it runs."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            known = json.loads(self._file(lease_id).read_text())
            return _alive(known["pid"], known["created"])
        return None

    def _file(self, lease_id: str) -> Path:
        return self.home / "agents" / lease_id / "agent.json"


def _instance_id(pid: int, created: float, lease_id: str) -> str:
    return f"{LOCAL_PREFIX}{pid}-{created}-{lease_id}"


def _process(instance_id: str) -> psutil.Process | None:
    """The process that an instance id names, if it runs."""
    with contextlib.suppress(ValueError):
        _, pid, created, _ = instance_id.split("-", 3)
        return _alive(int(pid), float(created))
    return None


def _alive(pid: int, created: float) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def _leaves(agent: psutil.Process) -> bool:
    """Whether an agent drains and ends by itself."""
    ends = time.monotonic() + LEAVE_S
    while time.monotonic() < ends and _runs_engines(agent):
        time.sleep(0.2)
    return _ends(agent, IDLE_LEAVE_S)


def _runs_engines(agent: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(guard.MODULE not in child.cmdline() for child in agent.children())
    return False


def _ends(process: psutil.Process, seconds: float) -> bool:
    """Whether it ends by itself in that time."""
    ends = time.monotonic() + seconds
    while _alive(process.pid, process.create_time()) is not None:
        if time.monotonic() >= ends:
            return False
        time.sleep(0.2)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as found:
        try:
            found.bind((ADDRESS, port))
        except OSError:
            return False
    return True

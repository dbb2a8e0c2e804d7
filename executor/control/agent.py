"""The agent of one node: does what the controller says, and ends by itself when that is gone.

It connects to the controller, whose public key it was given, with the keys of its lease; nobody
else can command it, since it listens to nobody. While the controller renews the lease the agent
goes on; past the lease's end it stops its processes and ends, so that a lost controller leaves
nothing running. Time in which the agent itself stood still (a machine that is paused or has no core
free) does not count: no renewal could be heard in it. Source: DESIGN, Execution.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq

from executor.control.keys import KeyPair
from executor.control.messages import WireError, decode, decode_processes, encode
from executor.control.notices import MetadataWatch
from executor.control.supervisor import Supervisor

REPORT_EVERY_S = 1.0
SILENCE_S = 5.0  # of a controller that renews every two: ZeroMQ gives up once it was refused
POLL_S = 0.2
STOOD_S = 2.0  # a turn of the loop that takes so long: it stood still
END_GRACE_S = 10.0  # of the processes, when the agent itself ends
LOG_LINES = 200

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent is started with."""

    lease_id: str
    controller: str  # 'tcp://10.0.0.1:7000'
    controller_key: str  # its public key
    keys: KeyPair
    folder: Path  # logs
    first_lease_s: float = 120.0  # until the controller renews it
    metadata: str | None = None  # where the cloud says that it will take the node


class Agent:
    """One node's side of the control channel."""

    def __init__(
        self, settings: AgentSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings, self.clock = settings, clock
        self.supervisor = Supervisor(settings.folder)
        self.expires_at = clock() + settings.first_lease_s
        self.why_ended = ""
        self.notices = MetadataWatch(settings.metadata) if settings.metadata else None
        self._leaving = False

    def run(self) -> str:
        """Until told to leave or past the lease's end; returns why."""
        context = zmq.Context()
        socket = self._connect(context)
        last_report = last_heard = turned = self.clock()
        if self.notices is not None:
            self.notices.start()
        try:
            while not self._ended(turned):
                turned = self.clock()
                if socket.poll(int(POLL_S * 1000)):
                    last_heard = self.clock()
                    self._receive(socket)
                elif self.clock() - last_heard >= SILENCE_S:
                    last_heard = self.clock()
                    socket.close(linger=0)
                    socket = self._connect(context)
                if self.clock() - last_report >= REPORT_EVERY_S:
                    last_report = self.clock()
                    self._send(socket, self._report())
        finally:
            if self.notices is not None:
                self.notices.stop()
            self.supervisor.stop_all(END_GRACE_S)
            self._send(socket, self._report())
            socket.close(linger=500)
            context.term()
        return self.why_ended

    def stop(self, why: str) -> None:
        """End at the next turn of the loop."""
        self._leaving, self.why_ended = True, why

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.curve_serverkey = self.settings.controller_key.encode("ascii")
        socket.curve_publickey = self.settings.keys.public.encode("ascii")
        socket.curve_secretkey = self.settings.keys.secret.encode("ascii")
        socket.setsockopt(zmq.SNDHWM, 100)  # reports are worth nothing later
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
        socket.connect(self.settings.controller)
        self._send(socket, self._hello())
        return socket

    def _ended(self, turned: float) -> bool:
        """Whether to; the loop turned last at that time."""
        stood = self.clock() - turned
        if stood >= STOOD_S:
            log.warning("nothing could be done for %.0f s; the lease is as much longer", stood)
            self.expires_at += stood
        if not self._leaving and self.clock() >= self.expires_at:
            self.stop("the lease ended and no controller renewed it")
        return self._leaving

    def _hello(self) -> bytes:
        return encode("hello", lease_id=self.settings.lease_id)

    def _report(self) -> bytes:
        reports = [asdict(report) for report in self.supervisor.watch()]
        found = self.notices.latest if self.notices is not None else None
        notice = {"kind": found.kind, "at": found.at.isoformat()} if found is not None else None
        return encode("report", lease_id=self.settings.lease_id, processes=reports, notice=notice)

    def _send(self, socket: zmq.Socket[bytes], data: bytes) -> None:
        try:
            socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            log.warning("the controller takes no messages; this one is dropped")

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        try:
            answer = self.handle(decode(socket.recv()))
        except WireError as error:
            log.warning("ignored: %s", error)
            return
        if answer is not None:
            self._send(socket, answer)

    def handle(self, message: Mapping[str, Any]) -> bytes | None:
        """Do what one message says; an answer, if it asks for one.

        Raises WireError: an unknown kind, or a field that is missing or of another kind.
        """
        try:
            match message["kind"]:
                case "renew":
                    self.expires_at = self.clock() + float(message["seconds"])
                case "start":
                    processes = decode_processes(message["processes"])
                    replica, generation = str(message["replica_id"]), int(message["generation"])
                    self.supervisor.start(replica, str(message["digest"]), generation, processes)
                case "stop":
                    self.supervisor.stop(str(message["replica_id"]), float(message["grace_s"]))
                case "log":
                    lines = min(LOG_LINES, int(message["lines"]))
                    replica, name = str(message["replica_id"]), str(message["name"])
                    text = self.supervisor.log(replica, name, lines)
                    return encode("log", replica_id=replica, name=name, text=text)
                case "leave":
                    self.stop("the controller ended the lease")
                case kind:
                    raise WireError(f"unknown kind {kind!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"{message['kind']}: {error!r}") from error
        return None

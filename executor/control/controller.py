"""The controller's side: agents come in by the keys of their leases, replicas are brought up.

Nodes without keys known yet may only say who they are, at a socket of its own (`claims`); letting
them in is somebody else's.

Desired is a set of leases with their public keys and a set of replica plans. Whoever connects is
known by the CURVE key of the connection alone: what a message says about its sender counts for
nothing, and a key without a lease is not let in. Converging is a function of what was asked and
what agents report, so it can be repeated: a replica with a failed process is stopped on all its
nodes and started again there as a whole, later each time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator

from executor.control.enrolment import Claim, decode_claim
from executor.control.gateways import Gateways
from executor.control.keys import KeyPair
from executor.control.messages import (
    ProcessReport,
    ProcessState,
    WireError,
    decode,
    decode_notice,
    decode_reports,
    encode,
    encode_processes,
)
from executor.control.notices import Notice
from executor.stage_plan import ReplicaPlan

RENEW_EVERY_S = 2.0
TELL_EVERY_S = 2.0  # agents to stop what is not wanted
LOST_AFTER_S = 10.0  # without a report
DRAIN_S = 65.0  # a stage's own grace and a little
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before a failed replica starts again
ENROL = "enrol"  # the ZAP domain of the socket that any key may come to
LARGEST_CLAIM_BYTES = 4096
MOST_CLAIMS = 256  # messages of one step; nodes ask again
STABLE_AFTER_S = 300.0  # a replica that ran so long starts anew from the first pause

log = logging.getLogger(__name__)


@dataclass
class Node:
    """One lease as the controller sees it."""

    lease_id: str
    public_key: str
    route: bytes | None = None  # the connection that came in by its key last
    seen_at: float | None = None
    reports: tuple[ProcessReport, ...] = ()
    notice: Notice | None = None  # what its cloud said of its end


@dataclass
class Running:
    """One replica's starts."""

    plan: ReplicaPlan
    generation: int = 0
    starts_at: float = 0.0  # not before
    started_at: float | None = None
    adopted: bool = False  # an earlier controller started it
    pause_s: float = FIRST_PAUSE_S
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Known:
    """Keys that may come in, for the authenticator's thread."""

    leases: dict[str, str] = field(default_factory=dict)  # public key -> lease id
    gateways: set[str] = field(default_factory=set)  # public keys

    def callback(self, domain: str, key: bytes) -> bool:
        name = key.decode("ascii")
        return name in self.leases or name in self.gateways


class _Anyone:
    """Every key that its holder proves to have."""

    def callback(self, domain: str, key: bytes) -> bool:
        return True


class Controller:
    """Binds, lets agents in, and converges; call `step` again and again."""

    def __init__(
        self,
        keys: KeyPair,
        lease_s: float = 30.0,
        address: str = "tcp://127.0.0.1:*",
        clock: Callable[[], float] = time.monotonic,
        enrol: str | None = None,  # where nodes enrol; None: one port above the address
        leases: Mapping[str, str]
        | None = None,  # known before the first can come: refused ones wait
    ) -> None:
        self.clock, self.lease_s, self.public_key = clock, lease_s, keys.public
        self.known, self.nodes, self.replicas = Known(), dict[str, Node](), dict[str, Running]()
        self.logs: dict[tuple[str, str], str] = {}
        self.gateways = Gateways(self._send_to, clock)
        self._renewed_at, self._told_at = -RENEW_EVERY_S, -TELL_EVERY_S
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self.known)
        self._authenticator.configure_curve_callback(ENROL, credentials_provider=_Anyone())
        self._socket, self._door = self._server(keys), self._server(keys)
        self._door.setsockopt_string(zmq.ZAP_DOMAIN, ENROL)
        self._door.setsockopt(zmq.MAXMSGSIZE, LARGEST_CLAIM_BYTES)
        self.want_leases(leases or {})
        try:
            self._socket.bind(address)
            self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self._door.bind(enrol or _next_port(address))
            self.enrol_address = self._door.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError:
            self.close()
            raise

    def _server(self, keys: KeyPair) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_publickey = keys.public.encode("ascii")
        socket.curve_secretkey = keys.secret.encode("ascii")
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
        return socket

    def close(self) -> None:
        self._socket.close(linger=1000)
        self._door.close(linger=1000)
        self._authenticator.stop()
        self._context.term()

    # What is wanted.

    def want_leases(self, keys: Mapping[str, str]) -> None:
        """Leases by id with their public keys; others leave and their keys stop working."""
        for lease_id in self.nodes.keys() - keys.keys():
            self._send(lease_id, encode("leave"))
            gone = self.nodes.pop(lease_id)
            self.known.leases.pop(gone.public_key, None)
        for lease_id in keys.keys() & self.nodes.keys():
            node = self.nodes[lease_id]
            if node.public_key != keys[lease_id]:  # made anew: the old one stops working
                self.known.leases.pop(node.public_key, None)
                self.known.leases[keys[lease_id]] = lease_id
                self.nodes[lease_id] = Node(lease_id, keys[lease_id])
        for lease_id in keys.keys() - self.nodes.keys():
            self.nodes[lease_id] = Node(lease_id, keys[lease_id])
            self.known.leases[keys[lease_id]] = lease_id

    def want_replicas(self, plans: Mapping[str, ReplicaPlan]) -> None:
        """Replicas by id; others, and those whose plan is another now, drain and stop."""
        for replica_id in self.replicas.keys() - plans.keys():
            del self.replicas[replica_id]
        for replica_id, plan in plans.items():
            known = self.replicas.get(replica_id)
            if known is None or known.plan.digest != plan.digest:
                self.replicas[replica_id] = Running(plan)

    def admit_gateways(self, public_key: str) -> None:
        """Who has this key may ask for routes, and for nothing else."""
        self.known.gateways.add(public_key)

    # What is.

    def step(self, seconds: float) -> None:
        """Take messages for so long, then converge."""
        ends = self.clock() + seconds
        while (left := ends - self.clock()) > 0:
            if self._socket.poll(max(1, int(left * 1000))):
                self._receive()
        now = self.clock()
        if now - self._renewed_at >= RENEW_EVERY_S:
            self._renewed_at = now
            for lease_id in self.nodes:
                self._send(lease_id, encode("renew", seconds=self.lease_s))
        self._stop_others(now)
        for running in self.replicas.values():
            self._converge(running, now)

    def claims(self) -> list[Claim]:
        """Who asked to be let in since the last call."""
        found: list[Claim] = []
        for _ in range(MOST_CLAIMS):  # whatever they are: who floods the door stops nothing else
            if not self._door.poll(0):
                break
            frames = self._door.recv_multipart(copy=False)
            if len(frames) != 2:
                continue
            key, address = str(frames[1].get("User-Id")), str(frames[1].get("Peer-Address"))
            try:
                message = decode(frames[1].bytes)
                found.append(decode_claim(frames[0].bytes, key, address, message))
            except WireError as error:
                log.warning("%s at the door: %s", address, error)
        return found

    def answer(self, claim: Claim, refused: str = "") -> None:
        """Tell a node that it is let in, or why not."""
        text = encode("refused", why=refused) if refused else encode("enrolled")
        self._door.send_multipart([claim.route, text])

    def is_present(self, lease_id: str) -> bool:
        """Whether the node's agent reported lately."""
        seen = self.seen_at(lease_id)
        return seen is not None and self.clock() - seen < LOST_AFTER_S

    def seen_at(self, lease_id: str) -> float | None:
        """When the node's agent said something last, by this controller's clock."""
        node = self.nodes.get(lease_id)
        return node.seen_at if node is not None else None

    def is_up(self, replica_id: str) -> bool:
        """Whether all processes of a replica's last start run, on nodes that report."""
        running = self.replicas.get(replica_id)
        if running is None or not all(map(self.is_present, running.plan.leases)):
            return False
        reports = self._reports(running)
        return len(reports) == len(running.plan.processes) and all(
            report.state is ProcessState.RUNNING for report in reports
        )

    def notice_of(self, lease_id: str) -> Notice | None:
        """What its cloud said of a node's end."""
        node = self.nodes.get(lease_id)
        return node.notice if node is not None else None

    def ask_log(self, replica_id: str, name: str, lines: int = 100) -> None:
        """Ask for a process's log; it comes into `logs`."""
        running = self.replicas.get(replica_id)
        for process in running.plan.processes if running else ():
            if process.name == name:
                self.logs.setdefault((replica_id, name), "")
                text = encode("log", replica_id=replica_id, name=name, lines=lines)
                self._send(process.lease_id, text)

    def _stop_others(self, now: float) -> None:
        """What runs and is not wanted drains: told again and again, since a message can be lost."""
        if now - self._told_at < TELL_EVERY_S:
            return
        self._told_at = now
        for node in self.nodes.values():
            for replica_id in {r.replica_id for r in node.reports if self._is_stray(r)}:
                message = encode("stop", replica_id=replica_id, grace_s=DRAIN_S)
                self._send(node.lease_id, message)

    def _is_stray(self, report: ProcessReport) -> bool:
        running = self.replicas.get(report.replica_id)
        wanted = running is not None and running.plan.digest == report.digest
        return report.state is ProcessState.RUNNING and not wanted

    def _converge(self, running: Running, now: float) -> None:
        plan = running.plan
        if not all(map(self.is_present, plan.leases)):
            return
        if running.generation == 0:
            self._adopt(running, now)
        if running.started_at is not None:
            reports = self._reports(running)
            failed = [r for r in reports if r.state is not ProcessState.RUNNING]
            missing = len(reports) < len(plan.processes)
            if not failed and not (missing and now - running.started_at > LOST_AFTER_S):
                return
            self._fail(running, failed, now)
        if now < running.starts_at or self._is_occupied(plan):
            return
        running.generation += 1
        running.started_at, running.adopted = now, False
        for lease_id in plan.leases:
            self._send(
                lease_id,
                encode(
                    "start",
                    replica_id=plan.replica_id,
                    digest=plan.digest,
                    generation=running.generation,
                    processes=encode_processes(plan.on(lease_id)),
                ),
            )

    def _adopt(self, running: Running, now: float) -> None:
        """Go on with what an earlier controller started, if it runs whole; count on from it."""
        mine = [
            report
            for lease_id in running.plan.leases
            for report in self.nodes[lease_id].reports
            if report.replica_id == running.plan.replica_id
        ]
        running.generation = max((report.generation for report in mine), default=0)
        if running.generation and self.is_up(running.plan.replica_id):
            running.started_at, running.adopted = now, True

    def _fail(self, running: Running, failed: Sequence[ProcessReport], now: float) -> None:
        """Stop it everywhere; it starts again after a pause."""
        if now - (running.started_at or now) > STABLE_AFTER_S:
            running.pause_s = FIRST_PAUSE_S
        what = ", ".join(f"{r.name} exit code {r.exit_code}" for r in failed)
        log.warning(
            "replica %s failed (%s); it starts again in %.0f s",
            running.plan.replica_id, what or "a node lost its processes", running.pause_s,
        )  # fmt: skip
        for lease_id in running.plan.leases:
            stop = encode("stop", replica_id=running.plan.replica_id, grace_s=0.0)
            self._send(lease_id, stop)
        running.starts_at = now + running.pause_s
        running.pause_s = min(LONGEST_PAUSE_S, 2.0 * running.pause_s)
        running.started_at = None
        running.restarts += 1

    def _is_occupied(self, plan: ReplicaPlan) -> bool:
        """Whether something else still runs on its nodes: it has their ports and memory."""
        return any(
            report.state is ProcessState.RUNNING
            and (report.replica_id, report.digest) != (plan.replica_id, plan.digest)
            for lease_id in plan.leases
            for report in self.nodes[lease_id].reports
        )

    def _reports(self, running: Running) -> list[ProcessReport]:
        """Of the replica's last start."""
        return [
            report
            for lease_id in running.plan.leases
            for report in (self.nodes[lease_id].reports if lease_id in self.nodes else ())
            if report.replica_id == running.plan.replica_id
            and report.digest == running.plan.digest
            and report.generation == running.generation
        ]

    def _send(self, lease_id: str, data: bytes) -> None:
        node = self.nodes.get(lease_id)
        if node is not None and node.route is not None:
            self._send_to(node.route, data)

    def _send_to(self, route: bytes, data: bytes) -> None:
        self._socket.send_multipart([route, data])

    def _receive(self) -> None:
        frames = self._socket.recv_multipart(copy=False)
        if len(frames) != 2:
            return
        route, frame = frames
        key = str(frame.get("User-Id"))  # of the connection: its sender cannot choose it
        if key in self.known.gateways:
            self._hear_gateway(route.bytes, frame.bytes)
            return
        node = self.nodes.get(self.known.leases.get(key) or "")
        if node is None:
            return
        try:
            message = decode(frame.bytes)
            node.route, node.seen_at = route.bytes, self.clock()
            match message["kind"]:
                case "report":
                    node.reports = decode_reports(message.get("processes"))
                    node.notice = decode_notice(message.get("notice"))
                case "log":
                    place = (str(message.get("replica_id")), str(message.get("name")))
                    if place in self.logs:
                        self.logs[place] = str(message.get("text"))
        except WireError as error:
            log.warning("lease %s: %s", node.lease_id, error)

    def _hear_gateway(self, route: bytes, data: bytes) -> None:
        try:
            self.gateways.hear(route, decode(data))
        except WireError as error:
            log.warning("a gateway: %s", error)


def _next_port(address: str) -> str:
    """Beside an address: where nodes enrol. Any free port beside any free port."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}" if port.isdecimal() else address

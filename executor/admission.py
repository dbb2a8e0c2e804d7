"""Who of a cloud's nodes is let in, and what is known of them: `nodes.json`.

A claim with the right ticket is checked against what the cloud lists of its lease, in a thread,
since a cloud may take seconds. The first key that passes is the lease's for good; another one is
refused, whatever it shows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock
from typing import TYPE_CHECKING

from executor.control.controller import Controller, Running
from executor.control.enrolment import Claim, instance_of, is_ticket
from executor.files import stamp
from executor.home import HomeFiles
from executor.nodes_file import Node, Nodes, read_nodes, write_nodes
from executor.stage_plan import ReplicaPlan
from planner.catch_up import Instance
from planner.errors import CoralError

if TYPE_CHECKING:
    from executor.aws.fleet import AwsFleet

LOOKS = 4  # at a cloud, at a time
WRITE_EVERY_S = 5.0  # how silent nodes are
NOT_AWAITED = "no such node is awaited now"

Look = Callable[[str], Sequence[Instance]]  # a lease's instances, as its cloud lists them
log = logging.getLogger(__name__)


@dataclass
class Admission:
    """The doorkeeper of one controller."""

    files: HomeFiles
    controller: Controller
    look: Look | None = None  # None: of the home's own cloud fleet
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._nodes = dict(read_nodes(self.files.nodes).nodes)
        self._pool = ThreadPoolExecutor(LOOKS)
        self._looking: dict[str, tuple[Claim, Future[Sequence[Instance]]]] = {}  # by lease
        self._answered: dict[str, tuple[ReplicaPlan, float]] = {}  # seconds since the start
        self._written_at = self.clock()
        self._asking = Lock()
        self._cloud: tuple[tuple[int, int] | None, AwsFleet | None] | None = None
        self._heard_from = dict.fromkeys(self._nodes, self.clock())  # or listened to since then

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def keys(self) -> Mapping[str, str]:
        """Public keys of nodes that are in, by lease id."""
        return {lease_id: node.public_key for lease_id, node in self._nodes.items()}

    @property
    def addresses(self) -> Mapping[str, str]:
        """Of the same nodes."""
        return {lease_id: node.address for lease_id, node in self._nodes.items()}

    def step(self, awaited: Collection[str], leaving: Collection[str], *, known: bool) -> None:
        """Judge who asks; forget nodes that are neither awaited nor leaving.

        Not `known`: what is awaited could not be read yet, so nothing is forgotten.
        """
        for claim in self.controller.claims():
            self._judge(claim, awaited)
        for lease_id, (claim, looking) in list(self._looking.items()):
            if looking.done():
                del self._looking[lease_id]
                self._decide(claim, looking, awaited)
        self._measure()
        gone = self._nodes.keys() - set(awaited) - set(leaving) if known else set()
        for lease_id in gone:
            del self._nodes[lease_id], self._heard_from[lease_id]
        if gone or (self._nodes and self.clock() - self._written_at >= WRITE_EVERY_S):
            self._write()

    def answered(self, running: Running) -> None:
        """A replica answers for the first time since a start: how long its nodes' parts took."""
        if running.started_at is None or running.adopted:
            return
        seconds = self.clock() - running.started_at
        for lease_id in running.plan.leases & self._nodes.keys():
            if self._nodes[lease_id].engine_s is None:
                self._answered.setdefault(lease_id, (running.plan, seconds))

    def _measure(self) -> None:
        """Nodes whose agents have said since how long their preparing took."""
        for lease_id, (plan, seconds) in list(self._answered.items()):
            if lease_id not in self._nodes or lease_id not in self.controller.nodes:
                del self._answered[lease_id]
                continue
            reports = self.controller.nodes[lease_id].reports
            said = {r.name: r.prepared_s for r in reports if r.replica_id == plan.replica_id}
            prepared = [said.get(p.name) for p in plan.on(lease_id) if p.prepare]
            known = [one for one in prepared if one is not None]
            if len(known) == len(prepared):
                weights = max(known, default=0.0)
                engine = max(0.0, seconds - weights)
                parts = {"weights_s": round(weights, 2), "engine_s": round(engine, 2)}
                self._nodes[lease_id] = self._nodes[lease_id].model_copy(update=parts)
                del self._answered[lease_id]
                self._write()

    def _judge(self, claim: Claim, awaited: Collection[str]) -> None:
        known = self._nodes.get(claim.lease_id)
        if not is_ticket(self.files.keys, claim):
            self._refuse(claim, "its ticket is not the lease's")
        elif claim.lease_id not in awaited:
            self.controller.answer(claim, NOT_AWAITED)
        elif known is not None and known.public_key == claim.public_key:
            self.controller.answer(claim)  # the answer was lost
        elif known is not None:
            self._refuse(claim, "its lease has another node already")
        elif claim.lease_id not in self._looking:
            look = self._pool.submit(self.look or self._ask_cloud, claim.lease_id)
            self._looking[claim.lease_id] = (claim, look)

    def _decide(
        self, claim: Claim, looking: Future[Sequence[Instance]], awaited: Collection[str]
    ) -> None:
        try:
            found = instance_of(claim, looking.result())
        except CoralError as error:
            self._refuse(claim, f"the cloud cannot be asked: {error}")
            return
        if isinstance(found, str):
            self._refuse(claim, found)
        elif claim.lease_id in awaited:
            self._nodes[claim.lease_id] = _node(claim, found)
            self._heard_from[claim.lease_id] = self.clock()
            self._write()  # before the node is told: its key must outlive this process
            log.info("lease %s: %s is in from %s", claim.lease_id, found.id, claim.address)
            self.controller.answer(claim)

    def _refuse(self, claim: Claim, why: str) -> None:
        log.warning("%s for lease %r is not let in: %s", claim.address, claim.lease_id, why)
        self.controller.answer(claim, why)

    def _ask_cloud(self, lease_id: str) -> Sequence[Instance]:
        """By the fleet that was made when the home's regions changed last: clients are dear."""
        from executor.aws.home import fleet_of_home

        with self._asking:
            mark = stamp(self.files.aws)
            if self._cloud is None or mark != self._cloud[0]:
                self._cloud = (mark, fleet_of_home(self.files))
            fleet = self._cloud[1]
        return [] if fleet is None else fleet.of_lease(lease_id)

    def _write(self) -> None:
        self._written_at = self.clock()
        for lease_id, node in self._nodes.items():
            seen = self.controller.seen_at(lease_id)
            silent = self.clock() - max(self._heard_from[lease_id], seen or 0.0)
            self._nodes[lease_id] = node.model_copy(update={"silent_s": round(silent, 1)})
        write_nodes(self.files.nodes, Nodes(nodes=self._nodes))


def _node(claim: Claim, instance: Instance) -> Node:
    launched = instance.launched_at.timestamp()
    boot = None if claim.began is None else round(max(0.0, claim.began - launched), 1)
    times = (claim.began, claim.installed)
    install = None if None in times else round((times[1] or 0.0) - (times[0] or 0.0), 1)
    return Node(
        public_key=claim.public_key,
        instance_id=instance.id,
        address=instance.addresses[0],
        enrolled_at=datetime.now(UTC),
        boot_s=boot,
        install_s=install,
    )

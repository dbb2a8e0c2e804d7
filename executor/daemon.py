"""The controller process: brings nodes to the deployment, and tells gateways who answers.

    deployment.json  what is to run                                   -> read here
    routes.json      which replicas answer, pushed to gateways too    -> written here
    controller.json  where agents connect, and this controller's key  -> written here
    notices.json     nodes whose cloud says that it takes them soon   -> written here
    nodes.json       nodes that came with keys of their own           -> written here

A replica is routed to once each of its engines answered its health endpoint after its start, and no
more as soon as one of its processes is not running, one of its nodes is to be taken, or it is to
go; a replica that is to go is stopped when gateways know that, or have had time to see it. Routes
outlive the controller, as nodes do: the next one keeps those to replicas that run on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import zmq
from filelock import FileLock, Timeout

from executor.admission import Admission, Look
from executor.control.controller import DRAIN_S, Controller
from executor.control.keys import KeyPair, load_or_make
from executor.control.messages import ProcessState
from executor.control.notices import SPOT
from executor.deployment import Deployment, DeploymentError, ReplicaSpec, read_deployment
from executor.files import stamp, write_whole
from executor.home import HomeFiles
from executor.nodes_file import read_nodes
from executor.notices_file import NodeNotice, Notices, write_notices
from executor.routes import Route, Routes, RoutesError, read_routes, write_routes
from executor.stage_plan import ReplicaPlan
from planner.errors import InputError

ADDRESS = "tcp://127.0.0.1:*"
STEP_S = 0.5
UNROUTED_S = 2.0  # before a replica that is to go is stopped: some gateways read the file
UNHEARD_S = 10.0  # more, at most, while a gateway that is there has not taken the routes over
HEALTH_TIMEOUT_S = 1.0
HEALTH_THREADS = 16
SLOW_S = 300.0  # a start that takes longer is said: an engine may hang, or its address be wrong
COME_BACK_S = 30.0  # agents to a new controller: they try every five
LEASE_S = 30.0

log = logging.getLogger(__name__)


class ControllerRunningError(InputError):
    """Another controller is at work on this home."""


class Daemon:
    """One controller at work on one home; use it in a `with` block and call `step`."""

    def __init__(
        self,
        home: Path,
        address: str = ADDRESS,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
        look: Look | None = None,
    ) -> None:
        self.files, self.clock = HomeFiles(home), clock
        home.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.files.lock, timeout=0)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise ControllerRunningError(
                f"a controller is at work on {home} already; stop it first"
            ) from error
        try:
            keys = self.files.controller_keys()
            self._secret = keys.secret
            self.controller = _controller(
                keys, lease_s, address, self.files.address, _keys_of_nodes(self.files)
            )
            self.controller.admit_gateways(load_or_make(self.files.gateway_key).public)
            self.admission = Admission(self.files, self.controller, look, clock)
        except BaseException:
            self._lock.release()
            raise
        self._client = httpx.Client(timeout=HEALTH_TIMEOUT_S, trust_env=False)
        self._askers = ThreadPoolExecutor(HEALTH_THREADS)
        self._asking: dict[tuple[str, int], Future[bool]] = {}  # by replica and generation
        self._seen: tuple[int, int] | None = None
        self._addresses: Mapping[str, str] = {}  # of nodes that enrolled, in the plans
        self._deployment, self._known = Deployment(), False
        self._plans: dict[str, ReplicaPlan] = {}
        self._going: dict[str, tuple[ReplicaPlan, float]] = {}  # until when it stays, unrouted
        self._leaving: dict[str, tuple[str, float]] = {}  # leases not wanted any more: key, until
        self._written: Routes | None = None
        self._noticed: dict[str, NodeNotice] = {}
        self._waiting: dict[tuple[str, int], float] = {}  # for a first answer, until it is said
        self._healthy: dict[str, int] = {}  # generation of a replica whose engines have answered
        self._earlier = self._routed_earlier()
        self._earlier_until = clock() + COME_BACK_S
        self._write_address(keys)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._askers.shutdown(cancel_futures=True)
        self.admission.close()
        self.files.controller.unlink(missing_ok=True)
        self._client.close()
        self.controller.close()
        self._lock.release()

    def step(self, seconds: float = STEP_S) -> None:
        """Look for a new deployment and nodes, converge, and write the routes."""
        self._read()
        now = self.clock()
        leaving = self._leaving.keys()
        self.admission.step(self._deployment.enrolling, leaving, known=self._known)
        self._plan_again()
        wait = 0.0 if self.controller.gateways.have_all else UNHEARD_S
        self._going = {k: v for k, v in self._going.items() if v[1] + wait > now}
        staying = {replica_id: plan for replica_id, (plan, _) in self._going.items()}
        self.controller.want_leases(self._wanted_leases(now))
        self.controller.want_replicas({**self._plans, **staying})
        self.controller.step(seconds)
        self._ask_health()
        self._write_routes()
        self._write_notices()

    def _wanted_leases(self, now: float) -> dict[str, str]:
        """Those of the deployment, and others while something drains on them."""
        for lease_id, (_, until) in list(self._leaving.items()):
            node = self.controller.nodes.get(lease_id)
            reports = node.reports if node else ()
            draining = any(report.state is ProcessState.RUNNING for report in reports)
            if now >= until or not (draining or self._going):
                del self._leaving[lease_id]
        leaving = {lease_id: key for lease_id, (key, _) in self._leaving.items()}
        return {**leaving, **self._deployment.keys(self.admission.keys)}

    def is_ready(self, replica_id: str) -> bool:
        """Whether a replica is up and its engines have answered since its last start."""
        running = self.controller.replicas.get(replica_id)
        return (
            running is not None
            and self.controller.is_up(replica_id)
            and self._healthy.get(replica_id) == running.generation
        )

    def _read(self) -> None:
        mark = stamp(self.files.deployment)
        if mark is None or mark == self._seen:
            return
        self._seen = mark
        addresses = self.admission.addresses
        try:
            deployment = read_deployment(self.files.deployment)
        except DeploymentError as error:
            log.error("%s; what runs goes on", error)
            return
        self._known = True
        leaves = self.clock() + UNROUTED_S + DRAIN_S
        keys = self._deployment.keys(self.admission.keys)
        for lease_id in keys.keys() - deployment.lease_ids:
            self._leaving[lease_id] = (keys[lease_id], leaves)
        self._take(deployment, addresses)

    def _plan_again(self) -> None:
        """Where other nodes are there than before."""
        addresses = self.admission.addresses
        if addresses != self._addresses:
            self._take(self._deployment, addresses)

    def _take(self, deployment: Deployment, addresses: Mapping[str, str]) -> None:
        """What replicas run from now on; what they ran stays a while, unrouted.

        One that cannot be run goes on with what it ran, if anything.
        """
        runnable, refused = deployment.plans(self._secret, addresses)
        plans = dict(runnable)
        for replica_id, why in refused.items():
            log.error("replica %s: %s; what runs goes on", replica_id, why)
            if replica_id in self._plans:
                plans[replica_id] = self._plans[replica_id]
        leaves = self.clock() + UNROUTED_S
        for replica_id, plan in self._plans.items():
            if replica_id not in plans or plans[replica_id].digest != plan.digest:
                self._going[replica_id] = (plan, leaves)
        self._deployment, self._plans, self._addresses = deployment, plans, addresses

    def _ask_health(self) -> None:
        """In threads of their own: a hung engine must not hold up renewals."""
        for replica_id, plan in self._plans.items():
            running = self.controller.replicas.get(replica_id)
            if running is None or not self.controller.is_up(replica_id):
                continue
            key = (replica_id, running.generation)
            if running.adopted and self._earlier.pop(replica_id, None) == plan.api_urls:
                self._healthy[replica_id] = running.generation
            asking = self._asking.get(key)
            if self._healthy.get(replica_id) == running.generation:
                self._asking.pop(key, None)
            elif asking is None:
                self._asking[key] = self._askers.submit(self._all_answer, plan.api_urls)
                self._say_if_slow(key, plan)
            elif asking.done():
                del self._asking[key]
                if asking.result():
                    self._healthy[replica_id] = running.generation
                    log.info("replica %s answers", replica_id)
                    self.admission.answered(running)

    def _say_if_slow(self, key: tuple[str, int], plan: ReplicaPlan) -> None:
        """Once for each of a replica's starts."""
        since = self._waiting.setdefault(key, self.clock())
        if self.clock() - since >= SLOW_S:
            self._waiting[key] = math.inf
            where = ", ".join(plan.api_urls)
            log.warning(
                "replica %s runs since %.0f s and does not answer at %s; see the logs of its nodes",
                plan.replica_id, self.clock() - since, where,
            )  # fmt: skip

    def _all_answer(self, urls: tuple[str, ...]) -> bool:
        try:
            return all(self._client.get(f"{url}/health").status_code == 200 for url in urls)
        except httpx.HTTPError:
            return False

    @property
    def _models(self) -> tuple[str, ...]:
        """Those with an objective too: a model that has no replica now is still served."""
        replicas = {replica.model for replica in self._deployment.replicas}
        return tuple(sorted(replicas | self._deployment.objectives.keys()))

    def _routed_earlier(self) -> dict[str, tuple[str, ...]]:
        """Engines' addresses by replica, as an earlier controller left them."""
        try:
            routes = read_routes(self.files.routes).routes
        except RoutesError as error:
            log.error("%s; replicas are routed to when they answer", error)
            return {}
        return {route.replica_id: route.urls for route in routes}

    def _is_routed(self, replica: ReplicaSpec) -> bool:
        if replica.id in self._going or self._is_taken(replica.lease_ids):
            return False
        return self.is_ready(replica.id) or self._is_awaited(replica.id)

    def _is_awaited(self, replica_id: str) -> bool:
        """Whether it answered an earlier controller, and its nodes may still say that it runs."""
        plan = self._plans.get(replica_id)
        if plan is None or self._earlier.get(replica_id) != plan.api_urls:
            return False
        known = all(map(self.controller.is_present, plan.leases))
        if known or self.clock() >= self._earlier_until:
            del self._earlier[replica_id]
        return replica_id in self._earlier

    def _write_routes(self) -> None:
        if not self._known:
            return  # nothing to compare what was routed earlier with
        found = Routes(
            models=self._models,
            routes=tuple(
                Route(
                    replica_id=replica.id,
                    model=replica.model,
                    phase=replica.phase,
                    urls=self._plans[replica.id].api_urls,
                    weight=max(1e-6, replica.share),
                    domain=replica.domain,
                    template_id=replica.template_id,
                )
                for replica in self._deployment.replicas
                if self._is_routed(replica)
            ),
            objectives=self._deployment.objectives,
        )
        if found != self._written:
            self._tell_gateways(found)

    def _tell_gateways(self, routes: Routes) -> None:
        write_routes(self.files.routes, routes)
        self.controller.gateways.publish(routes.model_dump(mode="json"))
        self._written = routes

    def _is_taken(self, lease_ids: frozenset[str]) -> bool:
        """Whether a cloud says that it takes one of the nodes."""
        return any(
            notice is not None and notice.kind == SPOT
            for notice in map(self.controller.notice_of, lease_ids)
        )

    def _write_notices(self) -> None:
        found = {
            lease_id: NodeNotice(kind=notice.kind, at=notice.at)  # type: ignore[arg-type]
            for lease_id in sorted(self.controller.nodes)
            if (notice := self.controller.notice_of(lease_id)) is not None
        }
        if found != self._noticed:
            write_notices(self.files.notices, Notices(nodes=found))
            self._noticed = found

    def _write_address(self, keys: KeyPair) -> None:
        content = {
            "address": self.controller.address,
            "enrol": self.controller.enrol_address,
            "public_key": keys.public,
            "pid": os.getpid(),
        }
        write_whole(self.files.controller, json.dumps(content))


def _keys_of_nodes(files: HomeFiles) -> Mapping[str, str]:
    """Public keys by lease, as the home's files have them; none where the deployment is broken."""
    try:
        deployment = read_deployment(files.deployment)
    except DeploymentError:
        return {}  # the first step says so
    nodes = read_nodes(files.nodes).nodes
    return deployment.keys({name: node.public_key for name, node in nodes.items()})


def _controller(
    keys: KeyPair, lease_s: float, address: str, remembered: Path, leases: Mapping[str, str]
) -> Controller:
    """At the address asked for; at the last one where any port will do, for agents know that."""
    if address == ADDRESS and remembered.exists():
        with contextlib.suppress(zmq.ZMQError):
            known = remembered.read_text().strip()
            return Controller(keys, lease_s, known, enrol=ADDRESS, leases=leases)
    found = Controller(keys, lease_s, address, leases=leases)
    remembered.write_text(found.address)
    return found

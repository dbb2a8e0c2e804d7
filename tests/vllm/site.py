"""A home with a controller, a gateway and agents as processes, for tests with a real vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil

from executor.deployment import (
    Deployment,
    EngineSpec,
    NodeSpec,
    ReplicaSpec,
    StageSpec,
    write_deployment,
)
from executor.gateway.app import REFRESH_S
from executor.home import HomeFiles
from executor.local import LocalFleet
from executor.routes import read_routes
from planner.leases import Lease, LeaseState
from planner.types import Market, Phase
from tests.support.ports import free_port

MODEL = "coral/tiny"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
LONG = "the reef is full of small fish that swim in shoals over the white sand " * 8
PROMPTS = [f"the reef is full of {what} " for what in ("fish", "sand", "white shoals")] + [LONG]
START_S = 600.0  # a first start compiles; a minute on an idle machine


def first_port() -> int:
    """With some free ones after it."""
    return 20000 + (free_port() % 20000)


@dataclass
class Site:
    """A home with a controller and a gateway."""

    home: Path
    engines: Mapping[str, EngineSpec]  # by the name that replicas give
    client: httpx.Client
    controller: subprocess.Popen[bytes]
    replicas: tuple[ReplicaSpec, ...] = ()

    @property
    def files(self) -> HomeFiles:
        return HomeFiles(self.home)

    def deploy(self, *replicas: ReplicaSpec) -> None:
        self.replicas = replicas
        leases = sorted({n.lease_id for r in replicas for s in r.stages for n in s.nodes})
        fleet = LocalFleet(self.home)
        for lease in leases:
            fleet.launch(
                Lease(lease, "local:here", "cpu", "CPU x1", Market.OWNED, 0.0,
                      LeaseState.PLANNED, NOW),
                NOW,
            )  # fmt: skip
        write_deployment(
            self.files.deployment,
            Deployment(
                engines=dict(self.engines),
                lease_keys={lease: fleet.public_key(lease) for lease in leases},
                replicas=replicas,
            ),
        )

    def routed(self) -> set[str]:
        return {route.replica_id for route in read_routes(self.files.routes).routes}

    def wait(self, *names: str) -> None:
        """Until exactly these are routed to, and the gateway has seen it."""
        assert wait_for(lambda: self.routed() == set(names), START_S), self.logs()
        time.sleep(3 * REFRESH_S)

    def complete(self, prompt: str, **changes: object) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0.0,
                "ignore_eos": True, **changes}  # fmt: skip
        return self.client.post("/v1/completions", json=body, timeout=120)

    def texts(self) -> list[str]:
        answers = [self.complete(prompt) for prompt in PROMPTS]
        assert all(answer.status_code == 200 for answer in answers), [a.text for a in answers]
        return [answer.json()["choices"][0]["text"] for answer in answers]

    def prompt_tokens(self, name: str) -> dict[str, float]:
        """Prompt tokens of a replica's engine by where they came from."""
        routes = read_routes(self.files.routes).routes
        url = next(route.urls[0] for route in routes if route.replica_id == name)
        found = {}
        for line in httpx.get(f"{url}/metrics", trust_env=False).text.splitlines():
            if line.startswith("vllm:prompt_tokens_by_source_total{"):
                found[line.split('source="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
        return found

    def logs(self) -> str:
        logs = sorted((self.home / "agents").glob("*/*.log"))
        return "\n".join(f"== {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def node(lease: str, core: str) -> NodeSpec:
    return NodeSpec(
        lease_id=lease, address="127.0.0.1", first_port=first_port(), node_class="CPU x1",
        tensor_parallel_size=1, data_parallel_size=1, batch=1, cores=(core,),
    )  # fmt: skip


def replica(
    name: str, phase: Phase, *stages: tuple[str, int], core: int = 0, engine: str = ""
) -> ReplicaSpec:
    """Stages as (lease, layers); each on a core of its own, from `core` on."""
    made, first = [], 0
    for number, (lease, layers) in enumerate(stages, core):
        one = node(lease, str(number % 2))
        made.append(StageSpec(first_layer=first, layers=layers, nodes=(one,)))
        first += layers
    return ReplicaSpec(id=name, model=MODEL, engine=engine, phase=phase, stages=tuple(made))


def coral(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "coral", *arguments]


@contextmanager
def site_at(home: Path, engines: Mapping[str, EngineSpec]) -> Iterator[Site]:
    port = free_port()
    controller = subprocess.Popen(coral("controller", "--home", str(home)))
    gateway = subprocess.Popen(coral("gateway", "--home", str(home), "--port", str(port)))
    try:
        files = HomeFiles(home)
        assert wait_for(files.controller.exists, 30)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            yield Site(home, engines, client, controller)
    finally:
        write_deployment(HomeFiles(home).deployment, Deployment())
        wait_for(lambda: not agents(home), 60)
        for process in (gateway, controller):
            process.terminate()
            process.wait(30)


def agents(home: Path) -> list[psutil.Process]:
    found = []
    for file in (home / "agents").glob("*/agent.json"):
        known = json.loads(file.read_text())
        if psutil.pid_exists(known["pid"]):
            process = psutil.Process(known["pid"])
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not condition():
        time.sleep(0.2)
    return condition()

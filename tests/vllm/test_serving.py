"""Plans served by vLLM: agents, controller and gateway as processes, requests over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil
import pytest

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
from executor.stage_plan import Connector
from planner.leases import Lease, LeaseState
from planner.types import Market, Phase
from tasks.local_site import ENVIRONMENT

MODEL = "coral/tiny"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
LONG = "the reef is full of small fish that swim in shoals over the white sand " * 8
PROMPTS = [f"the reef is full of {what} " for what in ("fish", "sand", "white shoals")] + [LONG]
START_S = 600.0  # a first start compiles; a minute on an idle machine


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def first_port() -> int:
    """With some free ones after it."""
    return 20000 + (free_port() % 20000)


@dataclass
class Site:
    """A home with a controller and a gateway."""

    home: Path
    engine: EngineSpec
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
                engines={MODEL: self.engine},
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


def replica(name: str, phase: Phase, *stages: tuple[str, int], core: int = 0) -> ReplicaSpec:
    """Stages as (lease, layers); each on a core of its own, from `core` on."""
    made, first = [], 0
    for number, (lease, layers) in enumerate(stages, core):
        one = node(lease, str(number % 2))
        made.append(StageSpec(first_layer=first, layers=layers, nodes=(one,)))
        first += layers
    return ReplicaSpec(id=name, model=MODEL, phase=phase, stages=tuple(made))


def coral(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "coral", *arguments]


@contextmanager
def site_at(home: Path, engine: EngineSpec) -> Iterator[Site]:
    port = free_port()
    controller = subprocess.Popen(coral("controller", "--home", str(home)))
    gateway = subprocess.Popen(coral("gateway", "--home", str(home), "--port", str(port)))
    try:
        files = HomeFiles(home)
        assert wait_for(files.controller.exists, 30)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            yield Site(home, engine, client, controller)
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


@pytest.fixture(scope="module")
def engine(
    vllm_command: tuple[str, ...], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> EngineSpec:
    return EngineSpec(
        command=vllm_command,
        model_path=str(tiny_model),
        max_model_len=512,
        dtype="float32",
        kv_cache_bytes=128 * 2**20,
        block_size=32,
        connector=Connector.NIXL,
        kv_folder=str(tmp_path_factory.mktemp("kv")),
        kv_device="cpu",
        environment=ENVIRONMENT,
    )


@pytest.fixture(scope="module")
def site(engine: EngineSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_at(tmp_path_factory.mktemp("site"), engine) as found:
        yield found


@pytest.fixture(scope="module")
def alone(site: Site) -> list[str]:
    """What a single process answers."""
    site.deploy(replica("alone", Phase.AGGREGATED, ("n0", 4)))
    site.wait("alone")
    return site.texts()


def test_one_node_serves_and_streams(site: Site, alone: list[str]) -> None:
    assert all(len(text) > 0 for text in alone)
    assert alone == site.texts()  # greedy: the same again
    with site.client.stream(
        "POST", "/v1/chat/completions", timeout=120,
        json={"model": MODEL, "stream": True, "max_tokens": 8,
              "messages": [{"role": "user", "content": "fish"}]},
    ) as response:  # fmt: skip
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 2
    assert site.complete("x", model="other").status_code == 404


def test_an_uneven_pipeline_over_two_nodes_answers_token_for_token(
    site: Site, alone: list[str]
) -> None:
    site.deploy(replica("pipe", Phase.AGGREGATED, ("n1", 3), ("n2", 1)))
    site.wait("pipe")
    assert site.texts() == alone


def test_a_killed_stage_fails_fast_and_the_replica_serves_again_by_itself(
    site: Site, alone: list[str]
) -> None:
    """After the pipeline's test; the second node's engine is killed while a request runs."""
    assert site.routed() == {"pipe"}
    victims = [
        process
        for agent in agents(site.home)
        if "n2" in agent.cmdline()
        for process in agent.children()
    ]
    assert victims
    body = {"model": MODEL, "prompt": "fish", "max_tokens": 400, "ignore_eos": True, "stream": True}
    started = 0.0
    with site.client.stream("POST", "/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        started = time.monotonic()
        rest = [line for line in lines if line]
    assert time.monotonic() - started < 10.0
    assert rest[-1] != "data: [DONE]"
    assert '"code": "failed"' in rest[-1]
    assert wait_for(lambda: site.routed() == set(), 15)
    time.sleep(3 * REFRESH_S)
    assert site.complete("fish").status_code == 503
    down = time.monotonic()
    site.wait("pipe")
    assert time.monotonic() - down < 180.0
    assert site.texts() == alone


def test_a_change_to_another_replica_under_load_loses_no_request(
    site: Site, alone: list[str]
) -> None:
    """After the killed stage's test: the pipeline gives way to a replica on one node."""
    (pipe,) = site.replicas
    assert site.routed() == {"pipe"}
    newcomer = replica("next", Phase.AGGREGATED, ("n3", 4))
    site.deploy(pipe, newcomer)
    site.wait("pipe", "next")
    leaving, stop = agents(site.home), threading.Event()
    with ThreadPoolExecutor(5) as pool:
        load = [pool.submit(complete_until, site, stop) for _ in range(4)]
        try:
            long = pool.submit(site.complete, "fish", max_tokens=480)
            time.sleep(2.0)
            site.deploy(newcomer)
            site.wait("next")
            answer = long.result(120)
            assert wait_for(lambda: len(agents(site.home)) == 1, 120), site.logs()
        finally:
            stop.set()
        answers = [one for worker in load for one in worker.result(120)]
    assert len(leaving) == 3
    assert len(answers) > 20
    assert {(one.status_code, tokens(one)) for one in answers} == {(200, 16)}
    assert (answer.status_code, tokens(answer)) == (200, 480)
    assert site.texts() == alone


def complete_until(site: Site, stop: threading.Event) -> list[httpx.Response]:
    answers = []
    while not stop.is_set():
        answers.append(site.complete(PROMPTS[len(answers) % len(PROMPTS)]))
    return answers


def tokens(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["completion_tokens"]) if answer.status_code == 200 else 0


@pytest.mark.parametrize("connector", [Connector.NIXL, Connector.FOLDER])
def test_prefill_and_decode_on_two_nodes(
    site: Site, alone: list[str], connector: Connector
) -> None:
    """What the decode side takes from outside it does not compute."""
    site.engine = site.engine.model_copy(update={"connector": connector})
    prefill, decode = f"prefill-{connector}", f"decode-{connector}"
    site.deploy(
        replica(prefill, Phase.PREFILL, ("n4", 4)),
        replica(decode, Phase.DECODE, ("n5", 4), core=1),
    )
    site.wait(prefill, decode)
    assert site.texts() == alone
    made, taken = site.prompt_tokens(prefill), site.prompt_tokens(decode)
    assert made["local_compute"] == sum(made.values()) == sum(taken.values())
    if connector is Connector.NIXL:
        assert taken["local_compute"] == 0
        assert taken["external_kv_transfer"] == sum(taken.values())
    else:  # whole blocks of 32 tokens, and never the last one
        assert taken["external_kv_transfer"] >= 96
        assert taken["local_compute"] < made["local_compute"]


def test_everything_ends_with_a_killed_controller(engine: EngineSpec, tmp_path: Path) -> None:
    """Agents and what they run end by themselves once their lease is over."""
    fake = (sys.executable, str(Path(__file__).parents[1] / "executor" / "fake_engine.py"))
    with site_at(tmp_path, engine.model_copy(update={"command": fake})) as site:
        site.deploy(replica("r", Phase.AGGREGATED, ("n0", 4)))
        assert wait_for(lambda: site.routed() == {"r"}, 60), site.logs()
        running = [p for a in agents(site.home) for p in (a, *a.children(recursive=True))]
        assert len(running) >= 2
        site.controller.kill()
        gone, alive = psutil.wait_procs(running, timeout=90)
        assert not alive
        assert len(gone) == len(running)

"""The controller process with agents in threads and engines that only answer /health."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from executor.daemon import ControllerRunningError, Daemon
from executor.deployment import (
    Deployment,
    DeploymentError,
    EngineSpec,
    NodeSpec,
    ReplicaSpec,
    StageSpec,
    read_deployment,
    write_deployment,
)
from executor.gateway.app import REFRESH_S, make_app
from executor.home import HomeFiles
from executor.routes import Routes, RoutesError, read_routes
from planner.types import Phase
from tests.executor.test_control import Here
from tests.support.gateway import served
from tests.support.ports import free_port
from tests.support.waiting import until_within

FAKE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))
ENGINE = EngineSpec(command=FAKE, model_path="m", max_model_len=64)


def node(lease: str) -> NodeSpec:
    return NodeSpec(
        lease_id=lease, address="127.0.0.1", first_port=free_port(), node_class="CPU x1",
        tensor_parallel_size=1, data_parallel_size=1, batch=1,
    )  # fmt: skip


def replica(name: str, *leases: str, share: float = 1.0) -> ReplicaSpec:
    stages = tuple(
        StageSpec(first_layer=n, layers=1, nodes=(node(lease),)) for n, lease in enumerate(leases)
    )
    return ReplicaSpec(id=name, model="org/m", phase=Phase.AGGREGATED, stages=stages, share=share)


@pytest.mark.parametrize(
    ("kv_tokens", "longest"), [(None, 4096), (100_000, 4096), (1000, 960), (40, 32)]
)
def test_no_engine_is_asked_for_longer_requests_than_its_kv_holds(
    kv_tokens: int | None, longest: int
) -> None:
    engine = ENGINE.model_copy(update={"max_model_len": 4096, "block_size": 32})
    plan = replica("r", "a").model_copy(update={"kv_tokens": kv_tokens}).plan(engine, "")
    argv = plan.processes[0].argv
    assert argv[argv.index("--max-model-len") + 1] == str(longest)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, lease_s=5.0) as found:
        yield found


@pytest.fixture
def agents(daemon: Daemon, tmp_path: Path) -> Iterator[list[Here]]:
    deploy(daemon)  # a key that is not known yet is refused, and tried again after a while
    daemon.step(0.1)
    started = [
        Here(daemon.controller, name, daemon.files.lease_keys(name), tmp_path / name)
        for name in ("a", "b")
    ]
    yield started
    for agent in started:
        agent.end()


def deploy(daemon: Daemon, *replicas: ReplicaSpec, leases: str = "ab") -> None:
    keys = {name: daemon.files.lease_keys(name).public for name in leases}
    content = Deployment(engines={"org/m": ENGINE}, lease_keys=keys, replicas=replicas)
    write_deployment(daemon.files.deployment, content)


until = until_within(25.0)


def routed(daemon: Daemon) -> set[str]:
    return {route.replica_id for route in read_routes(daemon.files.routes).routes}


def test_replicas_are_routed_to_once_they_answer(daemon: Daemon, agents: list[Here]) -> None:
    deploy(daemon, replica("r1", "a", share=0.7), replica("r2", "b", share=0.3))
    assert until(daemon, lambda: routed(daemon) == {"r1", "r2"})
    found = read_routes(daemon.files.routes)
    assert found.models == ("org/m",)
    assert {r.replica_id: r.weight for r in found.routes} == {"r1": 0.7, "r2": 0.3}
    for route in found.routes:
        assert httpx.get(f"{route.urls[0]}/health").status_code == 200


def test_a_killed_stage_takes_its_replica_off_the_routes_and_back(
    daemon: Daemon, agents: list[Here]
) -> None:
    deploy(daemon, replica("r1", "a", "b"))
    assert until(daemon, lambda: routed(daemon) == {"r1"})
    pid = daemon.controller.nodes["b"].reports[0].pid
    os.kill(pid, signal.SIGKILL)  # a remote stage: the head still answers /health
    assert until(daemon, lambda: routed(daemon) == set(), 5.0)
    assert read_routes(daemon.files.routes).models == ("org/m",)
    assert until(daemon, lambda: routed(daemon) == {"r1"})
    assert daemon.controller.replicas["r1"].generation == 2


def test_what_is_to_go_waits_for_gateways_to_know_but_not_for_ever(
    daemon: Daemon, agents: list[Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.daemon.UNROUTED_S", 0.2)
    gateways, has = daemon.controller.gateways, [""]

    def speaking(condition: Callable[[], bool]) -> Callable[[], bool]:
        def found() -> bool:
            gateways.hear(b"gateway", {"gateway": "g", "has": has[0]})
            return condition()

        return found

    deploy(daemon, replica("r1", "a"), replica("r2", "b"))
    assert until(daemon, speaking(lambda: routed(daemon) == {"r1", "r2"}))
    deploy(daemon, *daemon._deployment.replicas[:1], leases="a")
    assert until(daemon, speaking(lambda: routed(daemon) == {"r1"}), 3.0)
    assert not until(daemon, speaking(lambda: "r2" not in daemon.controller.replicas), 1.5)
    has[0] = gateways._mark
    assert until(daemon, speaking(lambda: "r2" not in daemon.controller.replicas), 3.0)
    monkeypatch.setattr("executor.daemon.UNHEARD_S", 0.5)
    deploy(daemon, leases="")
    assert until(daemon, speaking(lambda: daemon.controller.replicas == {}), 5.0)


def test_what_is_to_go_is_unrouted_before_it_is_stopped(daemon: Daemon, agents: list[Here]) -> None:
    deploy(daemon, replica("r1", "a"), replica("r2", "b"))
    assert until(daemon, lambda: routed(daemon) == {"r1", "r2"})
    url = next(r.urls[0] for r in read_routes(daemon.files.routes).routes if r.replica_id == "r2")
    kept = daemon._deployment.replicas[:1]
    deploy(daemon, *kept, leases="a")
    assert until(daemon, lambda: routed(daemon) == {"r1"}, 3.0)
    assert httpx.get(f"{url}/health").status_code == 200  # gateways may not have seen it yet
    assert until(daemon, lambda: "r2" not in daemon.controller.replicas)
    until(daemon, lambda: not agents[1].thread.is_alive(), 15)
    assert agents[1].why == "the controller ended the lease"
    assert routed(daemon) == {"r1"}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_lost_agent_takes_its_replica_off_the_routes(
    daemon: Daemon, agents: list[Here], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.control.controller.LOST_AFTER_S", 2.0)
    deploy(daemon, replica("r1", "a"), replica("r2", "b"))
    assert until(daemon, lambda: routed(daemon) == {"r1", "r2"})
    agents[1].end()
    assert until(daemon, lambda: routed(daemon) == {"r1"}, 10.0)


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Here]:
    """An agent of a home whose controller has ended; it runs a replica."""
    with Daemon(tmp_path, lease_s=20.0) as first:
        deploy(first, replica("r1", "a"), leases="a")
        first.step(0.1)
        agent = Here(first.controller, "a", first.files.lease_keys("a"), tmp_path / "a")
        assert until(first, lambda: routed(first) == {"r1"})
    yield agent
    agent.end()


def test_a_new_controller_goes_on_with_what_runs(left: Here, tmp_path: Path) -> None:
    before = read_routes(HomeFiles(tmp_path).routes)
    (started,) = left.agent.supervisor.watch()
    assert httpx.get(f"{before.routes[0].urls[0]}/health").status_code == 200
    with Daemon(tmp_path, lease_s=20.0) as second:
        seen: list[Routes] = []

        def is_heard() -> bool:
            seen.append(read_routes(second.files.routes))
            return second.is_ready("r1")

        assert until(second, is_heard)
        assert seen == [before] * len(seen)  # requests went on all the time
        assert [r.pid for r in second.controller.nodes["a"].reports] == [started.pid]
        assert second.controller.replicas["r1"].restarts == 0
        deploy(second, leases="a")
        assert until(
            second,
            lambda: all(r.exit_code is not None for r in second.controller.nodes["a"].reports),
        )
        assert routed(second) == set()


def test_a_restart_of_the_controller_costs_no_request(left: Here, tmp_path: Path) -> None:
    body = {"model": "org/m", "prompt": "x", "max_tokens": 3, "stream": True}
    answers: list[str] = []
    over = threading.Event()
    with served(make_app(tmp_path)) as base, httpx.Client(base_url=base, timeout=20) as client:

        def ask_on() -> None:
            while not over.is_set():
                answers.append(client.post("/v1/completions", json=body).text)
                over.wait(0.02)

        asking = threading.Thread(target=ask_on)
        time.sleep(REFRESH_S)
        asking.start()
        time.sleep(1.0)
        without = len(answers)
        with Daemon(tmp_path, lease_s=20.0) as second:
            gateways = second.controller.gateways
            assert until(second, lambda: second.is_ready("r1") and gateways.count == 1)
            assert until(second, lambda: gateways.have_all)
            until(second, lambda: False, 1.0)
        over.set()
        asking.join()
    assert without > 5 and len(answers) > without + 5
    assert {text.count('"text": "x"') for text in answers} == {3}


def test_what_stopped_while_there_was_no_controller_is_routed_to_no_more(
    left: Here, tmp_path: Path
) -> None:
    (started,) = left.agent.supervisor.watch()
    os.kill(started.pid, signal.SIGKILL)
    with Daemon(tmp_path, lease_s=20.0) as second:
        assert until(second, lambda: routed(second) == set())
        assert until(second, lambda: routed(second) == {"r1"})
        assert second.controller.nodes["a"].reports[0].pid != started.pid


def test_a_node_that_does_not_come_back_is_routed_to_no_more(
    left: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left.end()
    monkeypatch.setattr("executor.daemon.COME_BACK_S", 2.0)
    with Daemon(tmp_path, lease_s=20.0) as second:
        second.step(0.1)
        assert routed(second) == {"r1"}
        assert until(second, lambda: routed(second) == set(), 4.0)


def test_a_new_controller_with_other_commands_starts_them(left: Here, tmp_path: Path) -> None:
    content = read_deployment(HomeFiles(tmp_path).deployment)
    other = ENGINE.model_copy(update={"arguments": ("--other",)})
    write_deployment(
        HomeFiles(tmp_path).deployment, content.model_copy(update={"engines": {"org/m": other}})
    )
    with Daemon(tmp_path, lease_s=20.0) as second:
        assert until(second, lambda: routed(second) == set())
        assert until(second, lambda: routed(second) == {"r1"})
        assert "--other" in second._plans["r1"].processes[0].argv


def test_routes_that_cannot_be_read_are_made_anew(left: Here, tmp_path: Path) -> None:
    HomeFiles(tmp_path).routes.write_text("{")
    with Daemon(tmp_path, lease_s=20.0) as second:
        second.step(0.1)
        assert routed(second) == set()
        assert until(second, lambda: routed(second) == {"r1"})


def test_a_controller_keeps_its_address_though_the_next_port_is_taken(tmp_path: Path) -> None:
    with Daemon(tmp_path) as first:
        address = first.controller.address
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(address.rpartition(":")[2]) + 1))
        with Daemon(tmp_path) as second:
            assert second.controller.address == address
    port = free_port()
    with Daemon(tmp_path / "asked", f"tcp://127.0.0.1:{port}") as third:
        assert third.controller.enrol_address == f"tcp://127.0.0.1:{port + 1}"


def test_a_changed_plan_of_the_same_replica_starts_anew(daemon: Daemon, agents: list[Here]) -> None:
    deploy(daemon, replica("r1", "a"))
    assert until(daemon, lambda: routed(daemon) == {"r1"})
    deploy(daemon, replica("r1", "b"))  # another node and port
    assert until(daemon, lambda: routed(daemon) == set(), 3.0)
    assert until(daemon, lambda: routed(daemon) == {"r1"})
    url = read_routes(daemon.files.routes).routes[0].urls[0]
    assert url == daemon._plans["r1"].api_urls[0]
    assert httpx.get(f"{url}/health").status_code == 200
    assert until(
        daemon, lambda: all(r.exit_code is not None for r in daemon.controller.nodes["a"].reports)
    )


def test_a_newcomer_waits_for_the_node_and_its_ports(daemon: Daemon, agents: list[Here]) -> None:
    old = replica("old", "a")
    new = old.model_copy(update={"id": "new"})  # the same node and port
    deploy(daemon, old)
    assert until(daemon, lambda: routed(daemon) == {"old"})
    deploy(daemon, new)
    seen: list[set[str]] = []

    def both_run() -> bool:
        running = {
            r.replica_id for r in daemon.controller.nodes["a"].reports if r.exit_code is None
        }
        seen.append(running)
        return routed(daemon) == {"new"}

    assert until(daemon, both_run)
    assert {"old", "new"} not in seen
    assert daemon.controller.replicas["new"].restarts == 0


@pytest.mark.parametrize("trouble", ["two stages of prefill", "no engine"])
def test_a_replica_that_cannot_run_is_said_and_holds_no_other_up(
    daemon: Daemon, agents: list[Here], trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = replica("r1", "a")
    deploy(daemon, first)
    assert until(daemon, lambda: routed(daemon) == {"r1"})
    bad = replica("bad", "a", "b").model_copy(update={"phase": Phase.PREFILL})
    if trouble == "no engine":
        bad = replica("bad", "b").model_copy(update={"engine": "another"})
    deploy(daemon, bad.model_copy(update={"id": "r1"}), bad, replica("r2", "b"))
    assert until(daemon, lambda: routed(daemon) == {"r1", "r2"})  # r1 is what it was
    assert daemon._plans["r1"] == first.plan(ENGINE, "")
    assert "replica bad: " in caplog.text and "what runs goes on" in caplog.text


def test_one_controller_per_home(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(ControllerRunningError, match="is at work on"):
        Daemon(tmp_path)


def test_a_replica_that_never_answers_is_said(
    daemon: Daemon, agents: list[Here], monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr("executor.daemon.SLOW_S", 1.0)
    slow = ENGINE.model_copy(update={"arguments": ("--slow", "600")})
    keys = {name: daemon.files.lease_keys(name).public for name in "ab"}
    replicas = (replica("r", "a"),)
    content = Deployment(engines={"org/m": slow}, lease_keys=keys, replicas=replicas)
    write_deployment(daemon.files.deployment, content)
    said = "replica r runs since"
    assert until(daemon, lambda: said in caplog.text)
    assert not until(daemon, lambda: caplog.text.count(said) > 1, 2.0)  # once
    assert routed(daemon) == set()


def test_a_broken_deployment_changes_nothing(daemon: Daemon, agents: list[Here]) -> None:
    deploy(daemon, replica("r1", "a"))
    assert until(daemon, lambda: routed(daemon) == {"r1"})
    daemon.files.deployment.write_text("{")
    until(daemon, lambda: False, 1.5)
    assert routed(daemon) == {"r1"}
    with pytest.raises(DeploymentError, match="write it anew, whole"):
        read_deployment(daemon.files.deployment)


def test_route_files(tmp_path: Path) -> None:
    assert read_routes(tmp_path / "none.json") == Routes()
    (tmp_path / "bad.json").write_text('{"routes": 3}')
    with pytest.raises(RoutesError, match="not a route file"):
        read_routes(tmp_path / "bad.json")


def test_a_controller_says_where_it_is_and_that_it_has_gone(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        assert daemon.files.controller.exists()
        assert daemon.files.controller_keys().public == daemon.controller.public_key
    assert not daemon.files.controller.exists()

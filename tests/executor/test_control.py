"""Agents and a controller over real sockets, with real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from executor.control.agent import Agent, AgentSettings
from executor.control.controller import Controller
from executor.control.keys import KeyFileError, KeyPair, load_or_make, new_keys
from executor.control.messages import WireError, decode, encode
from executor.control.supervisor import Supervisor
from executor.stage_plan import ProcessPlan, ReplicaPlan
from planner.types import Phase
from tests.support.waiting import until_within

SLEEP = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")


def process(lease: str, name: str = "stage0-group0", argv: tuple[str, ...] = SLEEP) -> ProcessPlan:
    return ProcessPlan(name, lease, argv, {}, None)


def replica(name: str, *processes: ProcessPlan) -> ReplicaPlan:
    return ReplicaPlan(name, Phase.AGGREGATED, processes)


@pytest.fixture
def controller() -> Iterator[Controller]:
    found = Controller(new_keys(), lease_s=5.0)
    yield found
    found.close()


class Here:
    """An agent in a thread."""

    def __init__(
        self, controller: Controller, lease: str, keys: KeyPair, folder: Path, **changes: object
    ) -> None:
        settings = AgentSettings(
            lease, controller.address, controller.public_key, keys, folder, **changes
        )
        self.agent, self.why = Agent(settings), ""
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.why = self.agent.run()

    def end(self) -> None:
        self.agent.stop("test over")
        self.thread.join(20)


until = until_within(20.0)


def test_a_replica_over_two_nodes_comes_up_and_a_lost_process_restarts_it_whole(
    controller: Controller, tmp_path: Path
) -> None:
    keys = {name: new_keys() for name in ("a", "b")}
    controller.want_leases({name: pair.public for name, pair in keys.items()})
    agents = [Here(controller, name, pair, tmp_path / name) for name, pair in keys.items()]
    try:
        controller.want_replicas({"r": replica("r", process("a"), process("b", "stage1-group0"))})
        assert until(controller, lambda: controller.is_up("r"))
        before = {r.pid for name in keys for r in controller.nodes[name].reports}
        assert len(before) == 2
        controller.ask_log("r", "stage0-group0")
        assert until(controller, lambda: "up" in controller.logs.get(("r", "stage0-group0"), ""))
        os.kill(controller.nodes["b"].reports[0].pid, signal.SIGKILL)
        assert until(
            controller,
            lambda: (
                controller.is_up("r")
                and controller.replicas["r"].restarts == 1
                and before.isdisjoint(
                    r.pid for name in keys for r in controller.nodes[name].reports
                )
            ),
        )
        assert not any(psutil.pid_exists(pid) for pid in before)
        controller.want_replicas({})
        assert until(
            controller,
            lambda: all(r.pid is None or r.exit_code is not None for n in keys for r in
                        controller.nodes[n].reports),
        )  # fmt: skip
    finally:
        for agent in agents:
            agent.end()


def test_a_lease_that_is_not_wanted_any_more_leaves_and_its_key_stops_working(
    controller: Controller, tmp_path: Path
) -> None:
    keys = new_keys()
    controller.want_leases({"a": keys.public})
    agent = Here(controller, "a", keys, tmp_path)
    assert until(controller, lambda: controller.is_present("a"))
    controller.want_leases({})
    agent.thread.join(10)
    assert agent.why == "the controller ended the lease"
    again = Here(controller, "a", keys, tmp_path, first_lease_s=2.0)
    until(controller, lambda: not again.thread.is_alive(), 10)
    assert not controller.is_present("a")
    assert again.why.startswith("the lease ended and no controller renewed it")


def test_without_a_controller_an_agent_ends_what_it_runs(tmp_path: Path) -> None:
    first, keys = Controller(new_keys(), lease_s=2.0), new_keys()
    first.want_leases({"a": keys.public})
    agent = Here(first, "a", keys, tmp_path)
    first.want_replicas({"r": replica("r", process("a"))})
    assert until(first, lambda: first.is_up("r"))
    pid = first.nodes["a"].reports[0].pid
    first.close()
    agent.thread.join(15)
    assert agent.why == "the lease ended and no controller renewed it"
    assert not psutil.pid_exists(pid)


def test_a_node_that_stood_still_past_its_lease_goes_on(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, stands = new_keys(), threading.Event()
    controller.want_leases({"a": keys.public})
    agent = Here(controller, "a", keys, tmp_path)
    watch = agent.agent.supervisor.watch

    def stand() -> object:
        if stands.is_set():
            stands.clear()
            time.sleep(7.0)  # the lease is 5
        return watch()

    monkeypatch.setattr(agent.agent.supervisor, "watch", stand)
    try:
        controller.want_replicas({"r": replica("r", process("a"))})
        assert until(controller, lambda: controller.is_up("r"))
        started = controller.nodes["a"].reports[0].pid
        stands.set()
        assert until(controller, lambda: not stands.is_set())
        until(controller, lambda: False, 9.0)
        assert controller.is_up("r") and controller.nodes["a"].reports[0].pid == started
    finally:
        agent.end()


def test_a_command_that_is_not_there_is_a_failed_replica_with_a_log(
    controller: Controller, tmp_path: Path
) -> None:
    keys = new_keys()
    controller.want_leases({"a": keys.public})
    agent = Here(controller, "a", keys, tmp_path)
    try:
        controller.want_replicas({"r": replica("r", process("a", argv=("/no/such/engine",)))})
        assert until(controller, lambda: controller.replicas["r"].restarts >= 1)
        controller.ask_log("r", "stage0-group0")
        assert until(
            controller,
            lambda: (
                "cannot start /no/such/engine" in controller.logs.get(("r", "stage0-group0"), "")
            ),
        )
        assert not controller.is_up("r")
    finally:
        agent.end()


@contextlib.contextmanager
def intruder(
    controller: Controller, keys: KeyPair | None, identity: bytes = b""
) -> Iterator[zmq.Socket]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    if keys is not None:
        socket.curve_serverkey = controller.public_key.encode()
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.connect(controller.address)
    yield socket
    socket.close(linger=0)
    context.term()


@pytest.mark.parametrize("with_keys", [False, True])
def test_without_a_lease_nobody_registers_or_listens(
    controller: Controller, tmp_path: Path, with_keys: bool
) -> None:
    keys = new_keys()
    controller.want_leases({"a": keys.public})
    controller.want_replicas({"r": replica("r", process("a"))})
    with intruder(controller, new_keys() if with_keys else None) as socket:
        socket.send(encode("hello", lease_id="a"), zmq.NOBLOCK)
        socket.send(encode("report", lease_id="a", processes=[]), zmq.NOBLOCK)
        until(controller, lambda: False, 4.0)
        assert not controller.is_present("a")
        assert socket.poll(100) == 0  # no command, no renewal


def test_another_leases_key_speaks_for_its_own_lease_alone(
    controller: Controller, tmp_path: Path
) -> None:
    mine, other = new_keys(), new_keys()
    controller.want_leases({"a": mine.public, "b": other.public})
    agent = Here(controller, "a", mine, tmp_path)
    try:
        controller.want_replicas({"r": replica("r", process("a"))})
        assert until(controller, lambda: controller.is_up("r"))
        route = controller.nodes["a"].route
        with intruder(controller, other, identity=route or b"") as socket:
            digest = controller.replicas["r"].plan.digest
            forged = {"replica_id": "r", "digest": digest, "generation": 1, "name": "stage0-group0",
                      "state": "exited", "pid": 1, "exit_code": 1}  # fmt: skip
            for _ in range(5):
                socket.send(encode("report", lease_id="a", processes=[forged]), zmq.NOBLOCK)
            until(controller, lambda: False, 3.0)
            heard = []
            while socket.poll(100):
                heard.append(decode(socket.recv())["kind"])
        assert controller.replicas["r"].restarts == 0
        assert controller.is_up("r")
        assert set(heard) <= {"renew"}  # its own lease's, never a command of the other's
    finally:
        agent.end()


def test_nobody_commands_an_agent_but_the_controller_with_its_key(tmp_path: Path) -> None:
    """A false controller at the agent's address cannot prove the key that the agent was given."""
    true, false = new_keys(), Controller(new_keys(), lease_s=60.0)
    keys = new_keys()
    false.want_leases({"a": keys.public})
    settings = AgentSettings("a", false.address, true.public, keys, tmp_path, first_lease_s=3.0)
    agent = Agent(settings)
    thread = threading.Thread(target=agent.run)
    thread.start()
    until(false, lambda: False, 4.0)
    thread.join(10)
    assert not false.is_present("a")
    assert agent.why_ended == "the lease ended and no controller renewed it"
    false.close()


def test_workers_go_with_the_main_process_that_left_them(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); time.sleep(0.5)\n"
    )
    supervisor = Supervisor(tmp_path)
    supervisor.start("r", "d", 1, [process("a", argv=(sys.executable, "-c", code))])
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and supervisor.watch()[0].exit_code is None:
        time.sleep(0.1)
    worker = int((tmp_path / "r-stage0-group0.log").read_text())
    while time.monotonic() < deadline and psutil.pid_exists(worker):
        supervisor.watch()
        time.sleep(0.1)
    assert not psutil.pid_exists(worker) or (
        psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
    )


def test_messages_that_are_none_change_nothing(tmp_path: Path) -> None:
    agent = Agent(AgentSettings("a", "tcp://127.0.0.1:1", "", new_keys(), tmp_path))
    for bad in (b"{", b"[]", b'{"kind": 1}', b"x" * (5 * 2**20)):
        with pytest.raises(WireError):
            decode(bad)
    for message in (
        {"kind": "nonsense"}, {"kind": "start", "replica_id": "r"},
        {"kind": "start", "replica_id": "r", "generation": "x", "processes": []},
        {"kind": "start", "replica_id": "r", "generation": 1, "processes": [{"name": "n"}]},
        {"kind": "stop"}, {"kind": "renew", "seconds": "soon"},
    ):  # fmt: skip
        with pytest.raises(WireError):
            agent.handle(message)
    assert agent.supervisor.watch() == ()


def test_keys_are_private_files_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "controller.key"
    keys = load_or_make(path)
    assert load_or_make(path) == keys
    assert path.stat().st_mode & 0o077 == 0
    assert keys.secret not in repr(keys)
    other = new_keys()
    path.write_text(f"{keys.public}\n{other.secret}\n")
    with pytest.raises(KeyFileError, match="two keys are of two pairs"):
        load_or_make(path)
    path.write_text("rubbish")
    with pytest.raises(KeyFileError, match="is not a key file of Coral"):
        load_or_make(path)


def test_processes_die_with_a_killed_agent(tmp_path: Path) -> None:
    """Also those that they started themselves."""
    code = (
        "import time; from pathlib import Path\n"
        "from executor.control.supervisor import Supervisor\n"
        "from executor.stage_plan import ProcessPlan\n"
        "plan = ProcessPlan('p', 'a', ('sh', '-c', 'sleep 600 & wait'), {}, None)\n"
        f"s = Supervisor(Path({str(tmp_path)!r})); s.start('r', 'd', 1, [plan])\n"
        "print('up', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "up\n"
        started: list[psutil.Process] = []
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and "sleep" not in [p.name() for p in started]:
            started = psutil.Process(agent.pid).children(recursive=True)
        assert {"sh", "sleep"} <= {process.name() for process in started}
        agent.kill()
    assert not psutil.wait_procs(started, 10)[1]  # the guard ends last

"""Nodes that come with keys of their own: who is let in, over real sockets, and who is not."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import zmq

from executor.admission import NOT_AWAITED, Admission
from executor.control.agent import Agent, AgentSettings
from executor.control.controller import Controller
from executor.control.enrolment import Claim, instance_of, is_ticket, ticket_of
from executor.control.join import Joining, NotAdmittedError, join
from executor.control.keys import KeyPair, new_keys
from executor.control.messages import encode
from executor.daemon import Daemon
from executor.deployment import Deployment, write_deployment
from executor.files import write_whole
from executor.fleet import TransientError
from executor.home import HomeFiles
from executor.nodes_file import Node, Nodes, read_nodes, write_nodes
from planner.catch_up import Instance, InstanceState

LAUNCHED = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
HERE = Instance("i-1", "a", InstanceState.RUNNING, LAUNCHED, ("10.0.0.9", "127.0.0.1"))


def claim(**changes: object) -> Claim:
    made = Claim(b"r", "key", "127.0.0.1", "a", "ticket")
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_ticket_is_the_leases_and_the_homes(tmp_path: Path) -> None:
    one = ticket_of(tmp_path / "one", "a")
    assert ticket_of(tmp_path / "one", "a") == one
    assert len({one, ticket_of(tmp_path / "one", "b"), ticket_of(tmp_path / "two", "a")}) == 3
    assert is_ticket(tmp_path / "one", claim(ticket=one))
    assert not is_ticket(tmp_path / "one", claim(lease_id="b", ticket=one))
    assert not is_ticket(tmp_path / "one", claim(ticket="é"))
    assert (tmp_path / "one" / "enrol.secret").stat().st_mode & 0o777 == 0o600


def test_launches_side_by_side_make_one_secret(tmp_path: Path) -> None:
    for number in range(20):
        keys, at_once = tmp_path / str(number), threading.Barrier(16)

        def ticket(_: int, keys: Path = keys, at_once: threading.Barrier = at_once) -> str:
            at_once.wait()
            return ticket_of(keys, "a")

        with ThreadPoolExecutor(16) as pool:
            assert len(set(pool.map(ticket, range(16)))) == 1
        assert [path.name for path in keys.iterdir()] == ["enrol.secret"]


@pytest.mark.parametrize(
    ("instances", "why"),
    [
        ([], "no instance that lives for lease a"),
        ([replace(HERE, lease_id="b")], "no instance that lives for lease a"),
        ([replace(HERE, state=InstanceState.STOPPING)], "no instance that lives for lease a"),
        ([replace(HERE, addresses=("10.0.0.9",))], "asks from 127.0.0.1, and .* has 10.0.0.9"),
        ([replace(HERE, addresses=())], "has none"),
    ],
)
def test_only_the_leases_living_instance_at_its_own_address_may_come_in(
    instances: list[Instance], why: str
) -> None:
    found = instance_of(claim(), instances)
    assert isinstance(found, str)
    assert re.search(why, found)
    assert instance_of(claim(), [*instances, HERE]) is HERE


@dataclass
class Door:
    """A controller that lets nodes in, in a thread."""

    files: HomeFiles
    instances: Sequence[Instance] = (HERE,)
    awaited: tuple[str, ...] = ("a",)
    broken: bool = False
    looks: list[str] = field(default_factory=list)

    def __enter__(self) -> Door:
        self.controller = Controller(self.files.controller_keys(), lease_s=10.0)
        self.admission = Admission(self.files, self.controller, self._look)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.admission.close()
        self.controller.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.admission.step(self.awaited, (), known=True)
            self.controller.want_leases(self.admission.keys)
            self.controller.step(0.02)

    def _look(self, lease_id: str) -> Sequence[Instance]:
        self.looks.append(lease_id)
        if self.broken:
            raise TransientError("throttled")
        return self.instances

    def join(self, keys: KeyPair, patience_s: float = 5.0, **changes: object) -> None:
        asked = Joining(
            self.controller.enrol_address, self.controller.public_key, "a",
            ticket_of(self.files.keys, "a"), LAUNCHED.timestamp() + 40, LAUNCHED.timestamp() + 100,
        )  # fmt: skip
        join(replace(asked, **changes), keys, patience_s, ask_every_s=0.2)  # type: ignore[arg-type]


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    with Door(HomeFiles(tmp_path)) as found:
        yield found


def test_a_node_is_let_in_once_and_known_for_good(door: Door) -> None:
    keys = new_keys()
    door.join(keys)
    node = read_nodes(door.files.nodes).nodes["a"]
    assert (node.public_key, node.instance_id, node.address) == (keys.public, "i-1", "10.0.0.9")
    assert (node.boot_s, node.install_s) == (40.0, 60.0)
    door.join(keys)  # the answer was lost
    assert door.looks == ["a"]
    with pytest.raises(NotAdmittedError, match="its lease has another node already"):
        door.join(new_keys(), 0.5)
    door.__exit__()
    with Door(door.files, instances=()) as again:  # the cloud need not be asked again
        again.join(keys)
        with pytest.raises(NotAdmittedError, match="another node"):
            again.join(new_keys(), 0.5)
    door.__enter__()


def test_who_is_not_the_leases_node_stays_outside(door: Door, tmp_path: Path) -> None:
    def refused(why: str, **changes: object) -> None:
        with pytest.raises(NotAdmittedError, match=why):
            door.join(new_keys(), 0.5, **changes)

    refused("its ticket is not the lease's", ticket="0" * 32)
    refused("its ticket is not the lease's", lease_id="b")
    assert door.looks == []  # a cloud is not asked for whoever knocks
    refused(NOT_AWAITED, lease_id="b", ticket=ticket_of(door.files.keys, "b"))
    door.instances = [replace(HERE, addresses=("10.0.0.9",))]
    refused(r"asks from 127\.0\.0\.1")
    door.broken = True
    refused("the cloud cannot be asked: throttled")
    assert read_nodes(door.files.nodes).nodes == {}
    door.broken, door.instances = False, [HERE]
    door.join(new_keys())


def test_a_node_is_silent_since_it_was_heard_of_not_since_the_controller_began(
    door: Door,
) -> None:
    now = [1e6 + door.admission.clock()]
    door.admission.clock = lambda: now[0]  # a controller that is up for days
    door.join(new_keys())
    assert read_nodes(door.files.nodes).nodes["a"].silent_s < 1.0
    now[0] += 200.0
    assert waited(lambda: read_nodes(door.files.nodes).nodes["a"].silent_s == 200.0)


def test_what_is_awaited_must_be_known_before_a_node_is_forgotten(tmp_path: Path) -> None:
    files = HomeFiles(tmp_path)
    node = Node(public_key="k", instance_id="i-1", address="10.0.0.9", enrolled_at=LAUNCHED)
    write_nodes(files.nodes, Nodes(nodes={"a": node}))
    files.deployment.write_text("{")
    with Daemon(tmp_path) as daemon:
        daemon.step(0.05)
        assert daemon.admission.keys == {"a": "k"}
        write_deployment(files.deployment, Deployment(enrolling=("a",)))
        daemon.step(0.05)
        assert daemon.admission.keys == {"a": "k"}
        write_deployment(files.deployment, Deployment())
        daemon.step(0.05)
        daemon.step(0.05)
        assert daemon.admission.keys == {}


def test_garbage_at_the_door_changes_nothing(door: Door) -> None:
    keys = new_keys()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.curve_serverkey = door.controller.public_key.encode()
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        socket.connect(door.controller.enrol_address)
        for text in (b"", b"{", b"[]", encode("start"), encode("enrol", lease_id="x" * 999)):
            socket.send(text)
        for began in ("soon", 10**3000, float("nan"), float("inf")):
            socket.send(encode("enrol", lease_id="a", ticket="t", began=began))
        socket.send(encode("enrol", lease_id="a", ticket="\ud800"))
        socket.send(encode("enrol", lease_id="\ud800", ticket="t"))
        socket.send_multipart([b"two", b"frames"])
        socket.send(encode("enrol", lease_id={}, ticket=[]))
        assert socket.poll(3000)
        assert b"refused" in socket.recv()
    door.join(new_keys())


def test_a_key_that_was_let_in_serves_and_one_that_was_not_does_not(
    door: Door, tmp_path: Path
) -> None:
    keys, stranger = new_keys(), new_keys()
    door.join(keys)
    agents = []
    for pair in (keys, stranger):
        settings = AgentSettings(
            "a", door.controller.address, door.controller.public_key, pair, tmp_path / "logs"
        )
        agents.append(Agent(settings))
    threads = [threading.Thread(target=agent.run) for agent in agents]
    for thread in threads:
        thread.start()
    assert waited(lambda: door.controller.is_present("a"))
    first = agents[1].expires_at
    time.sleep(0.5)
    assert agents[1].expires_at == first  # nobody renews a stranger
    door.awaited = ()
    assert waited(lambda: agents[0].why_ended == "the controller ended the lease")
    agents[1].stop("the test ends")
    for thread in threads:
        thread.join()
    assert read_nodes(door.files.nodes).nodes == {}


def waited(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_looks_at_a_cloud_share_its_clients_until_the_home_has_another_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    class Fleet:
        def of_lease(self, lease_id: str) -> list[Instance]:
            return [replace(HERE, lease_id=lease_id)]

    def fleet_of_home(files: HomeFiles) -> Fleet:
        made.append(files.aws.read_text())
        return Fleet()

    monkeypatch.setattr("executor.aws.home.fleet_of_home", fleet_of_home)
    files = HomeFiles(tmp_path)
    with Daemon(tmp_path) as daemon:
        for content in ("one", "two"):
            write_whole(files.aws, content)
            assert [daemon.admission._ask_cloud(name)[0].lease_id for name in "abc"] == [*"abc"]
    assert made == ["one", "two"]

"""What can go wrong with a fleet, through the command that an operator types."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from catalog.store import Catalog
from coral.cli import main
from executor.daemon import Daemon
from planner.leases import LeaseState
from tasks.operating import fleet_lock, lease_store
from tasks.scenario_file import parse_scenario
from tests.support.aws_server import AwsServer
from tests.support.library import build_library, catalog_with
from tests.support.stub_node import terminate_all
from tests.tasks.test_operate_aws import EAST, WEST, content

Said = tuple[int, str, str]  # exit code, output, errors
Coral = Callable[..., Said]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scenario = parse_scenario(content(Path("/opt/coral"), "http://x"), "it")
    return build_library(tmp_path_factory.mktemp("library"), scenario)


@pytest.fixture
def home(library: Path, tmp_path: Path) -> Path:
    return catalog_with(library, tmp_path / "home").home


@pytest.fixture
def cloud(aws: AwsServer) -> Iterator[AwsServer]:
    yield aws
    aws.faults.clear()
    terminate_all(EAST, WEST)


@pytest.fixture
def controller(home: Path) -> Iterator[Daemon]:
    ended = threading.Event()
    with Daemon(home, lease_s=20.0) as daemon:

        def work() -> None:
            while not ended.is_set():
                daemon.step(0.1)

        thread = threading.Thread(target=work)
        thread.start()
        yield daemon
        ended.set()
        thread.join(20)


@pytest.fixture
def coral(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Coral:
    """The command, in this process."""
    monkeypatch.setattr("coral.interrupt.stop_on_signals", lambda: None)

    def run(*words: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["coral", *words, "--home", str(home)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


@pytest.fixture
def operate(coral: Coral, cloud: AwsServer, tmp_path: Path) -> Coral:
    """`coral operate` of the scenario in two regions, with changes."""

    def run(*words: str, **changes: Any) -> Said:
        found = content(tmp_path / "image", cloud.url)
        for key, value in changes.items():
            (found if key in found else found["fleet"])[key] = value
        file = tmp_path / "cloud.yaml"
        file.write_text(json.dumps(found))
        return coral("operate", "-s", str(file), *words)

    return run


def in_one_line(said: Said) -> str:
    """What a command that refuses says, and nothing else."""
    code, out, err = said
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    return line


def nothing_is_written(home: Path) -> bool:
    return not (home / "leases.sqlite").exists() and not (home / "aws.json").exists()


def test_a_node_class_that_no_fleet_can_make(operate: Coral, home: Path) -> None:
    line = in_one_line(operate(node_classes=["L4 x1", "A100-80GB-PCIe x1"]))
    assert (
        "no cloud of its domains (aws) rents A100-80GB-PCIe x1; leave it out of node_classes"
        in line
    )
    assert nothing_is_written(home)


def test_a_wrong_region(operate: Coral, cloud: AwsServer, home: Path) -> None:
    line = in_one_line(operate(domains=["aws:us-east-11"]))
    assert "unknown domain 'aws:us-east-11'" in line and "did you mean 'aws:us-east-1'" in line
    assert cloud.calls == [] and nothing_is_written(home)


def test_a_bogus_image_is_refused_with_the_way_out(
    operate: Coral, cloud: AwsServer, controller: Daemon, home: Path
) -> None:
    cloud.fail("RunInstances", "InvalidAMIID.NotFound", message="no such image ami-0")
    code, out, _ = operate("--json", aws={
        "endpoint_url": cloud.url, "images": {EAST: "ami-0", WEST: "ami-0"},
    })  # fmt: skip
    found = json.loads(out)
    assert (code, found["launched"], found["nodes"]) == (2, 0, 0)
    assert found["refused"] == found["failed"] > 0
    assert "no such image ami-0; correct fleet.aws.images" in found["reasons"][0]
    assert all(x.state is LeaseState.FAILED for x in lease_store(Catalog(home)).all())


def test_a_denied_action_is_named_with_the_line_that_the_policy_lacks(
    operate: Coral, cloud: AwsServer, controller: Daemon
) -> None:
    cloud.fail("RunInstances", "UnauthorizedOperation")
    code, out, _ = operate("--json")
    found = json.loads(out)
    assert (code, found["launched"]) == (2, 0)
    assert 'to the policy: {"Effect": "Allow", "Action": "ec2:RunInstances"' in found["reasons"][0]
    assert "ec2:RunInstances" in operate()[1]  # as people read it


def test_a_quota_of_zero(operate: Coral, cloud: AwsServer, controller: Daemon) -> None:
    cloud.fail("RunInstances", "VcpuLimitExceeded", message="your limit is 0 vCPUs")
    code, out, _ = operate("--json")
    found = json.loads(out)
    assert (code, found["refused"], found["nodes"]) == (1, 0, 0)
    assert "your limit is 0 vCPUs; ask for more in Service Quotas" in found["reasons"][0]
    assert "planned again, for no capacity was found for" in found["why"]


def test_instances_that_a_user_ends_by_hand_are_replaced(
    operate: Coral, coral: Coral, cloud: AwsServer, controller: Daemon, home: Path
) -> None:
    first = json.loads(operate("--json")[1])
    store = lease_store(Catalog(home))
    gone = store.all()[0]
    region = gone.domain.partition(":")[2]
    boto3.client("ec2", region_name=region).terminate_instances(
        InstanceIds=[gone.instance_id or ""]
    )
    code, out, _ = operate("--json")
    found = json.loads(out)
    assert (code, found["launched"], found["nodes"]) == (0, 1, first["nodes"])
    assert {x.id: x.state for x in store.all()}[gone.id] is LeaseState.TERMINATED
    assert json.loads(coral("down", "--yes", "--json")[1]) == {"terminated": first["nodes"]}
    assert all(x.state.is_over for x in store.all())


def test_of_two_controllers_and_of_two_rounds_the_second_refuses(
    operate: Coral, coral: Coral, controller: Daemon, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "a controller is at work on" in in_one_line(coral("controller"))
    monkeypatch.setattr("tasks.operating.LOCK_PATIENCE_S", 0.1)
    with fleet_lock(Catalog(home)):
        assert "another command is moving the fleet" in in_one_line(operate())
    assert nothing_is_written(home)

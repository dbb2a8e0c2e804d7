"""`operate` on EC2, the whole way: launches, nodes that come to life, replicas that answer, ends.

AWS is the local server; an instance is a process that runs the user data of its launch.
"""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest

from catalog.store import Catalog
from coral.cli import main
from executor.aws.fleet import NOTICE_S
from executor.aws.home import AwsFileError, fleet_of_home, read_aws_file
from executor.control.controller import DRAIN_S
from executor.daemon import Daemon
from executor.deployment import read_deployment
from executor.home import HomeFiles
from executor.local import NoControllerError
from executor.nodes_file import StartUp, read_nodes
from executor.routes import read_routes
from executor.weights.moving import push
from executor.weights.store import open_store
from planner.errors import ScenarioError
from planner.leases import LeaseState
from planner.scenario import ScenarioSpec
from tasks.aws_site import UnreachableControllerError, WeightsPlaceError, aws_fleet, policy
from tasks.fleet_view import end_fleet, end_one, list_start_ups, sweep
from tasks.inputs import load_inputs
from tasks.operating import Round, lease_store, operate_once
from tasks.scenario_file import parse_scenario
from tasks.start_ups import with_measured_start_up
from tests.executor.test_notices import Metadata
from tests.executor.test_weights import safetensors
from tests.support.aws_server import AwsServer
from tests.support.library import build_library, catalog_with
from tests.support.stub_node import StubNode, bake, place, terminate_all, user_data_of
from tests.support.waiting import until_within

EAST, WEST = "us-east-1", "us-west-2"
MODEL, LAYERS = "Qwen/Qwen3-14B", 40
BUCKET = "s3://models/qwen"


def content(
    root: Path, url: str, metadata: str = "http://127.0.0.1:9", **fleet: Any
) -> dict[str, Any]:
    """A scenario file: one small model, two regions that share the load."""
    return {
        "name": "cloud",
        "workloads": [
            {
                "model": MODEL,
                "slo": {"ttft_ms": 2000, "tpot_ms": 80},
                "lengths": "azure2023_conv",
                "demand": {"requests_per_s": 0.3},
                "largest_domain_share": 0.6,
            }
        ],
        "node_classes": ["L4 x1", "L40S x1"],
        "domains": [f"aws:{EAST}", f"aws:{WEST}"],
        "engine": "vllm",
        "placement": {"max_nodes": 1, "decode_batch_sizes": [8], "prefill_batch_sizes": [1]},
        "fleet": {
            "kind": "aws",
            "max_usd_per_hour": 20,
            "aws": {"endpoint_url": url, "root": str(root), "metadata": metadata},
            "engines": {MODEL: {"path": "models/qwen", "weights": BUCKET, "max_model_len": 8192}},
            **fleet,
        },
    }


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with the scenario's templates."""
    return build_library(
        tmp_path_factory.mktemp("library"),
        parse_scenario(content(Path("/opt/coral"), "http://x"), "it"),
    )


@pytest.fixture
def catalog(library: Path, tmp_path: Path) -> Catalog:
    return catalog_with(library, tmp_path / "home")


@pytest.fixture
def cloud(aws: AwsServer) -> Iterator[AwsServer]:
    yield aws
    aws.faults.clear()
    aws.enabled |= {EAST, WEST}
    terminate_all(EAST, WEST)


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    found = Metadata()
    yield found
    found.server.shutdown()


@pytest.fixture
def spec(cloud: AwsServer, metadata: Metadata, tmp_path: Path) -> ScenarioSpec:
    return parse_scenario(content(tmp_path / "image", cloud.url, metadata.url), "it")


@pytest.fixture
def daemon(catalog: Catalog) -> Iterator[Daemon]:
    with Daemon(catalog.home, lease_s=60.0) as found:  # rounds may be slow beside other tests
        yield found


def operate(catalog: Catalog, spec: ScenarioSpec, seconds: float = 0.0, **more: Any) -> Round:
    now = datetime.now(UTC) + timedelta(seconds=seconds)
    return operate_once(catalog, spec, load_inputs(catalog, spec), now, **more)


until = until_within(30.0)


def living() -> dict[str, str]:
    """Instances that are not over, with their regions."""
    found = {}
    for region in (EAST, WEST):
        rows = boto3.client("ec2", region_name=region).describe_instances()["Reservations"]
        for one in (one for row in rows for one in row["Instances"]):
            if one["State"]["Name"] in {"pending", "running"}:
                found[one["InstanceId"]] = region
    return found


def push_model(folder: Path) -> None:
    """To the bucket, two layers a file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    for first in range(0, LAYERS, 2):
        names = [f"model.layers.{n}.w" for n in (first, first + 1)]
        names += ["model.embed_tokens.weight", "lm_head.weight"] if first == 0 else []
        safetensors(folder / f"model-{first}.safetensors", names, size=500)
    boto3.client("s3").create_bucket(Bucket="models")
    push(folder, open_store(BUCKET))


@pytest.mark.allow_hosts(["127.0.0.1", "127.0.0.2", "127.0.0.3", "localhost"])
def test_nodes_come_to_life_serve_and_go(
    catalog: Catalog, spec: ScenarioSpec, daemon: Daemon, cloud: AwsServer, tmp_path: Path
) -> None:
    bake(tmp_path / "image")
    push_model(tmp_path / "model")
    first = operate(catalog, spec)
    assert not first.applied.why
    assert first.applied.launched == first.nodes == len(living()) >= 2
    assert set(living().values()) == {EAST, WEST}
    files, nodes = HomeFiles(catalog.home), []
    for number, (instance_id, region) in enumerate(sorted(living().items())):
        script = user_data_of(instance_id, region)
        secrets = [files.controller_keys().secret, (files.keys / "enrol.secret").read_bytes().hex()]
        assert not any(secret in script for secret in secrets)
        assert not any(word in script for word in ("testing", "AWS_SECRET", "BEGIN "))
        place(instance_id, region, f"127.0.0.{number + 2}", "127.0.0.1")
        nodes.append(StubNode.boot(instance_id, region, tmp_path / instance_id))
    try:
        wanted = {replica.id for replica in read_deployment(files.deployment).replicas}
        assert until(
            daemon, lambda: {r.replica_id for r in read_routes(files.routes).routes} == wanted
        )
        for route in read_routes(files.routes).routes:
            assert httpx.get(f"{route.urls[0]}/health", trust_env=False).status_code == 200
        folder = tmp_path / "image" / "models" / "qwen" / f"layers-0-{LAYERS - 1}"
        assert len(list(folder.glob("*.safetensors"))) == LAYERS // 2

        assert until(
            daemon,
            lambda: all(x.engine_s is not None for x in read_nodes(files.nodes).nodes.values()),
        )
        again = operate(catalog, spec)
        assert again.applied.nothing
        store = lease_store(catalog)
        assert {lease.state for lease in store.all()} == {LeaseState.READY}
        starts = store.start_ups()
        assert {one.lease_id for one in starts} == {lease.id for lease in store.all()}
        assert all(one.engine_s > 0 and one.total_s < 60 for one in starts)
        assert any(one.weights_s > 0 for one in starts)  # who came second found them there

        # One node loses its power: it is replaced.
        lost = nodes.pop()
        lost.end()
        boto3.client("ec2", region_name=living()[lost.instance_id]).terminate_instances(
            InstanceIds=[lost.instance_id]
        )
        assert operate(catalog, spec).applied.launched == 1
        assert lost.instance_id not in living() and len(living()) == first.nodes

        # Another is drained: requests stop, then it is ended.
        kept = next(x for x in store.all() if x.instance_id == nodes[0].instance_id)
        waits: list[float] = []
        end_one(str(catalog.home), kept.id, drain=True, sleep=waits.append)
        assert waits == [DRAIN_S + NOTICE_S]
        assert kept.instance_id not in living()
        assert kept.id not in read_deployment(files.deployment).lease_ids
    finally:
        assert end_fleet(str(catalog.home)) >= 1
        assert living() == {}
        until(daemon, lambda: all(node.process.poll() is not None for node in nodes), 40.0)
        for node in nodes:
            assert node.process.poll() is not None  # the agent left by itself
            node.end()
    assert {lease.state for lease in lease_store(catalog).all()} == {LeaseState.TERMINATED}
    used = {name for name in cloud.actions() if name.split(":")[0] in {"ec2", "ssm"}}
    assert used - {"ec2:DescribeInstanceAttribute"} <= allowed_actions()  # that one is this test's


def allowed_actions() -> set[str]:
    """Of the shipped policy."""
    found = [one["Action"] for one in policy()["Statement"]]
    return {name for one in found for name in ([one] if isinstance(one, str) else one)}


def with_aws(spec: ScenarioSpec, **changes: Any) -> ScenarioSpec:
    aws = spec.fleet.aws.model_copy(update=changes)
    return with_fleet(spec, aws=aws)


def with_fleet(spec: ScenarioSpec, **changes: Any) -> ScenarioSpec:
    return spec.model_copy(update={"fleet": spec.fleet.model_copy(update=changes)})


def test_a_draft_shows_every_call_and_leaves_nothing(
    catalog: Catalog, spec: ScenarioSpec, cloud: AwsServer
) -> None:
    draft = operate(catalog, spec, draft=True)  # it needs no controller
    calls = Counter(" ".join(call.split()[:2]) for call in draft.calls or ())
    assert calls == {
        "ec2:CreateSecurityGroup coral-new": 2, "ec2:CreateLaunchTemplate coral-new-*": 2,
        "ec2:RunInstances g6e.xlarge": 2,
    }  # fmt: skip
    assert any("in us-west-2 in zone usw2-az" in call for call in draft.calls or ())
    assert not [name for name in cloud.actions() if "Describe" not in name and "Get" not in name]
    assert not (catalog.home / "aws.json").exists()
    assert lease_store(catalog).all() == []


def test_what_a_fleet_on_aws_needs_is_said_before_anything_is_made(
    catalog: Catalog, spec: ScenarioSpec, cloud: AwsServer
) -> None:
    with pytest.raises(NoControllerError, match="start one with `coral controller`"):
        operate(catalog, spec)
    with Daemon(catalog.home), pytest.raises(UnreachableControllerError, match="tcp://0"):
        aws_fleet(catalog.home, with_aws(spec, endpoint_url=None), {})
    engines = {MODEL: spec.fleet.engines[MODEL].model_copy(update={"weights": ""})}
    with pytest.raises(WeightsPlaceError, match=r"would not find Qwen/Qwen3-14B: give .*`weights`"):
        operate(catalog, with_fleet(spec, engines=engines), draft=True)
    assert not (catalog.home / "aws.json").exists()
    assert cloud.actions()["ec2:RunInstances"] == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"domains": ["aws:us-east-1", "gcp:us-central1"]}, "not in gcp:us-central1"),
        ({"engine": "any"}, "an aws fleet runs stock vLLM, or .* plan with engine: vllm or coral"),
        ({"max_usd_per_hour": None}, "an aws fleet says max_usd_per_hour"),
        ({"engines": {}}, "an aws fleet says its engines"),
        ({"kind": "simulated"}, "engines go with kind: local or aws"),
        ({"aws": {"admit": ["0.0.0.0/0"]}}, "would let everybody reach the engines"),
        ({"aws": {"admit": ["ten"]}}, "fleet.aws.admit"),
        (
            {"engines": {MODEL: {"path": "m", "random": {}, "max_model_len": 9}}},
            "go with kind: local",
        ),
        ({"aws": {"root": "coral"}}, "root must be a folder by its whole path"),
        ({"aws": {"colour": "red"}}, "unknown key 'fleet.aws.colour'"),
    ],
)
def test_scenarios_that_cannot_be_are_refused(
    catalog: Catalog, change: dict[str, Any], why: str
) -> None:
    found = content(Path("/opt/coral"), "http://127.0.0.1:9")
    for key, value in change.items():
        (found if key in found else found["fleet"])[key] = value
    with pytest.raises(ScenarioError, match=why):
        load_inputs(catalog, parse_scenario(found, "it"))


@pytest.mark.parametrize(
    ("action", "code", "why"),
    [
        ("RunInstances", "VcpuLimitExceeded", "VcpuLimitExceeded: .*; ask for more in Service Q"),
        ("CreateSecurityGroup", "UnauthorizedOperation", 'policy: .*"ec2:CreateSecurityGroup"'),
    ],
)
def test_launches_that_aws_refuses_are_said_and_leave_nothing(
    catalog: Catalog, spec: ScenarioSpec, daemon: Daemon, cloud: AwsServer, action: str,
    code: str, why: str,
) -> None:  # fmt: skip
    cloud.fail(action, code)
    found = operate(catalog, spec)
    assert found.applied.launched == 0 and found.nodes == 0
    assert re.search(why, found.applied.why[0])
    assert {lease.state for lease in lease_store(catalog).all()} == {LeaseState.FAILED}
    assert living() == {}
    assert end_fleet(str(catalog.home)) == 0


def test_mistakes_of_an_account_end_the_command_with_one_sentence(
    catalog: Catalog, spec: ScenarioSpec, cloud: AwsServer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / "cloud.yaml"
    file.write_text(json.dumps(content(tmp_path / "image", cloud.url)))

    def said() -> str:
        command = ["coral", "operate", "--dry-run", "-s", str(file), "--home", str(catalog.home)]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    cloud.enabled -= {WEST}
    assert "region us-west-2 is not switched on for this account" in said()
    cloud.fail("DescribeInstances", "UnauthorizedOperation")
    assert 'add to the policy: {"Effect": "Allow", "Action": "ec2:DescribeInstances"' in said()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    assert "no AWS credentials: run `aws configure`" in said()


def test_a_home_keeps_to_its_endpoint_and_remembers_every_region(
    catalog: Catalog, spec: ScenarioSpec, daemon: Daemon, cloud: AwsServer
) -> None:
    operate(catalog, spec)
    files = HomeFiles(catalog.home)
    east = spec.model_copy(update={"domains": (f"aws:{EAST}",)})
    operate(catalog, east, seconds=90)
    assert fleet_of_home(files).regions == (EAST, WEST)  # type: ignore[union-attr]
    with pytest.raises(AwsFileError, match=r"end them with `coral down` and delete aws\.json"):
        operate(catalog, with_aws(spec, endpoint_url="http://127.0.0.1:9"))
    files.aws.write_text("{")
    with pytest.raises(AwsFileError, match="do not delete it while some do"):
        end_fleet(str(catalog.home))


def test_scenarios_of_a_home_together_say_who_is_admitted(
    catalog: Catalog, spec: ScenarioSpec, daemon: Daemon, cloud: AwsServer
) -> None:
    one, two = "10.1.0.0/16", "10.2.0.0/16"
    operate(catalog, with_aws(spec, admit=(one, two)))
    files = HomeFiles(catalog.home)
    assert operate(catalog, with_aws(spec, admit=(one, two))).applied.nothing
    other = with_aws(spec, admit=(two,)).model_copy(update={"name": "other"})
    operate(catalog, other)
    less = with_aws(spec, admit=(one,))
    calls = cloud.actions()["ec2:RevokeSecurityGroupIngress"]
    operate(catalog, less)  # the other scenario still admits it
    assert cloud.actions()["ec2:RevokeSecurityGroupIngress"] == calls == 0
    none = other.model_copy(update={"fleet": with_aws(other, admit=()).fleet})
    draft = operate(catalog, none, draft=True)
    said = [call for call in draft.calls or () if "Revoke" in call]
    assert said == [
        f"ec2:RevokeSecurityGroupIngress {two} in {name}, coral-{read_aws_file(files.aws).fleet_id}"
        for name in (EAST, WEST)
    ]
    assert cloud.actions()["ec2:RevokeSecurityGroupIngress"] == 0
    assert operate(catalog, none).applied.launched == 0  # nothing is launched, and yet
    assert cloud.actions()["ec2:RevokeSecurityGroupIngress"] == 2
    assert read_aws_file(files.aws).admitted == {EAST: (one,), WEST: (one,)}
    end_fleet(str(catalog.home))
    assert read_aws_file(files.aws).networks == ()


def test_scenarios_of_a_home_start_the_same_model_each_in_its_own_way(
    catalog: Catalog, spec: ScenarioSpec, daemon: Daemon, cloud: AwsServer
) -> None:
    operate(catalog, spec)
    longer = {MODEL: spec.fleet.engines[MODEL].model_copy(update={"max_model_len": 9000})}
    other = with_fleet(spec, engines=longer).model_copy(update={"name": "other"})
    operate(catalog, other)
    found = read_deployment(HomeFiles(catalog.home).deployment)
    scenario = {lease.id: lease.scenario for lease in lease_store(catalog).all()}
    lengths = {
        (scenario[min(one.lease_ids)], found.engines[one.engine].max_model_len)
        for one in found.replicas
    }
    assert lengths == {("cloud", 8192), ("other", 9000)}


def test_orphans_in_any_region_are_swept_and_an_unanswered_end_is_told_again(
    catalog: Catalog, spec: ScenarioSpec, daemon: Daemon, cloud: AwsServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    operate(catalog, spec)
    store = lease_store(catalog)
    lost = next(lease for lease in store.all() if lease.domain == f"aws:{WEST}")
    with sqlite3.connect(store.path) as file:  # a lease file from a backup
        file.execute("DELETE FROM lease WHERE id = ?", [lost.id])
    later = datetime.now(UTC) + timedelta(minutes=2)
    monkeypatch.setattr("tasks.fleet_view.datetime", Clock(later))
    assert f"instance {lost.instance_id} ended" in sweep(str(catalog.home))
    assert lost.instance_id not in living()
    monkeypatch.setattr("executor.aws.clients.ATTEMPTS", 1)
    cloud.fail("TerminateInstances", "RequestLimitExceeded", times=3, status=503)
    assert end_fleet(str(catalog.home)) == 1
    assert living() == {}


class Clock:
    """Another time."""

    def __init__(self, at: datetime) -> None:
        self.at = at

    def now(self, zone: object) -> datetime:
        return self.at


def test_measured_start_ups_are_what_new_nodes_cost(catalog: Catalog, spec: ScenarioSpec) -> None:
    store, home = lease_store(catalog), catalog.home
    given = spec.allocation.startup_minutes
    for number, minutes in enumerate((3, 5, 4, 30)):
        at = datetime(2026, 11, 30, number, tzinfo=UTC)
        found = StartUp(f"lease-{number}", at, f"aws:{EAST}", "g6e.xlarge",
                        30.0, 60.0 * minutes - 60.0, 20.0, 10.0)  # fmt: skip
        store.save_start_ups([found, found])
        measured = with_measured_start_up(home, spec).allocation.startup_minutes
        assert measured == [given, given, 4.0, 5.0][number]
    inputs = load_inputs(catalog, spec)
    assert inputs.scenario.allocation.startup_minutes == 5.0
    assert with_measured_start_up(home, with_fleet(spec, start_up="given")) == with_fleet(
        spec, start_up="given"
    )
    elsewhere = spec.model_copy(update={"domains": ("aws:eu-central-1",)})
    assert with_measured_start_up(home, elsewhere).allocation.startup_minutes == given
    columns, rows = list_start_ups(str(home))
    assert dict(zip(columns, rows[0], strict=True)) == {
        "instance type": "g6e.xlarge", "nodes": 4, "boot s": 30.0, "install s": 210.0,
        "weights s": 20.0, "engine s": 10.0, "all s": 270.0,
    }  # fmt: skip

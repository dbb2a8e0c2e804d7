"""Coral's pipelines on EC2 nodes: what their user data gives them, as far as stand-ins go."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from executor.aws.clients import AwsClients
from executor.aws.fleet import AwsFleet
from executor.aws.groups import FIRST_PORT
from executor.aws.home import note_fleet
from executor.aws.regions import RegionSettings
from executor.daemon import Daemon
from executor.deployment import Deployment, NodeSpec, ReplicaSpec, StageSpec, write_deployment
from executor.local import LocalFleet
from executor.nodes_file import read_nodes
from executor.routes import read_routes
from planner.leases import Lease, LeaseState
from planner.types import Market, Phase
from tasks.aws_site import Boots, aws_engines
from tasks.scenario_file import parse_scenario
from tests.support.aws_server import AwsServer
from tests.support.stub_node import FAKE_ENGINE, StubNode, bake, place, program, terminate_all
from tests.support.waiting import until_within
from tests.tasks.test_operate_aws import EAST, MODEL, content

NOW = datetime.now(UTC)
until = until_within(30.0)


@pytest.fixture
def cloud(aws: AwsServer) -> Iterator[AwsServer]:
    yield aws
    terminate_all(EAST)


def engine_python(root: Path) -> None:
    """Runs nothing of vLLM; refuses where Coral's pipelines are not to be imported."""
    fake = f"exec {sys.executable} {FAKE_ENGINE}"
    program(
        root / "engine" / "bin" / "python",
        f'{sys.executable} -c "import coral_vllm_pipeline as p; print(p.__file__)" '
        f">>{root}/imported || exit 3\n"
        f'[ "$2" = coral_vllm_pipeline.node ] && {fake} --headless\n'
        f'shift; {fake} "$@"',
    )


def lease(name: str) -> Lease:
    return Lease(
        name, f"aws:{EAST}", "g6.xlarge", "L4 x1", Market.ON_DEMAND, 0.8, LeaseState.PLANNED, NOW,
        fleet="aws", requested_at=NOW,
    )  # fmt: skip


def stage(first: int, layers: int, name: str) -> StageSpec:
    node = NodeSpec(
        lease_id=name, first_port=FIRST_PORT, node_class="L4 x1", tensor_parallel_size=1,
        data_parallel_size=1, batch=1,
    )  # fmt: skip
    return StageSpec(first_layer=first, layers=layers, nodes=(node,))


@pytest.mark.allow_hosts(["127.0.0.1", "127.0.0.2", "127.0.0.3", "localhost"])
def test_a_pipeline_over_two_nodes_has_its_parts_and_answers(
    cloud: AwsServer, tmp_path: Path
) -> None:
    root = tmp_path / "image"
    bake(root)
    engine_python(root)
    (root / "models" / "qwen").mkdir(parents=True)
    found = content(root, cloud.url) | {"engine": "coral"}
    found["fleet"]["engines"][MODEL] = {
        "path": f"{root}/models/qwen", "max_model_len": 8192, "transport": "zmq",
    }  # fmt: skip
    spec = parse_scenario(found, "it")
    with Daemon(tmp_path / "home", lease_s=60.0) as daemon:
        files, site = daemon.files, spec.fleet.aws
        known = note_fleet(files, spec.name, site, [EAST])
        boots = Boots(files, site, LocalFleet(files.home).require_controller(), pipelines=True)
        fleet = AwsFleet(
            AwsClients(), known.fleet_id, (EAST,), RegionSettings(), user_data=boots.script,
            nodes=lambda: read_nodes(files.nodes).nodes,
        )  # fmt: skip
        replica = ReplicaSpec(
            id="r1", model=MODEL, phase=Phase.AGGREGATED,
            stages=(stage(0, 30, "a"), stage(30, 10, "b")),
        )  # fmt: skip
        wanted = Deployment(
            engines=dict(aws_engines(spec)), enrolling=("a", "b"), replicas=(replica,)
        )
        write_deployment(files.deployment, wanted)
        stubs = []
        try:
            for number, name in enumerate("ab"):
                instance = fleet.launch(lease(name), NOW).instance_id
                place(instance, EAST, f"127.0.0.{number + 2}", "127.0.0.1")
                stubs.append(StubNode.boot(instance, EAST, tmp_path / name))
            assert until(daemon, lambda: bool(read_routes(files.routes).routes))
            (route,) = read_routes(files.routes).routes
            assert route.urls[0].startswith("http://127.0.0.2:")
            imported = set((root / "imported").read_text().split())
            assert imported == {str(root / "pipelines" / "coral_vllm_pipeline" / "__init__.py")}
        finally:
            for stub in stubs:
                stub.end()

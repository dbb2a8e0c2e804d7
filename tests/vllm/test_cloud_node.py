"""An EC2 node with a real vLLM: user data, enrolment, weights from S3, requests, its end."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import boto3
import httpx

from executor.aws.clients import AwsClients
from executor.aws.fleet import AwsFleet
from executor.aws.groups import FIRST_PORT
from executor.aws.home import note_fleet
from executor.aws.regions import RegionSettings
from executor.daemon import Daemon
from executor.deployment import (
    Deployment,
    EngineSpec,
    NodeSpec,
    ReplicaSpec,
    StageSpec,
    write_deployment,
)
from executor.home import HomeFiles
from executor.local import LocalFleet
from executor.nodes_file import Node, read_nodes
from executor.routes import read_routes
from executor.weights.moving import push
from executor.weights.store import open_store
from planner.catch_up import InstanceState
from planner.cloud_site import AwsSite
from planner.leases import Lease, LeaseState
from planner.types import Market, Phase
from tasks.aws_site import Boots
from tasks.local_site import ENVIRONMENT
from tests.support.aws_server import AwsServer
from tests.support.stub_node import StubNode, bake, place, terminate_all

NOW = datetime.now(UTC)
REGION, MODEL, LAYERS = "us-east-1", "coral/tiny", 4
BUCKET = "s3://tiny-models/tiny"
START_S = 600.0  # a first start compiles


def test_a_node_comes_to_life_with_vllm_and_serves(
    vllm_command: tuple[str, ...], tiny_model: Path, aws: AwsServer, tmp_path: Path
) -> None:
    image, files = tmp_path / "image", HomeFiles(tmp_path / "home")
    bake(image, engine=" ".join(vllm_command))
    boto3.client("s3").create_bucket(Bucket="tiny-models")
    push(tiny_model, open_store(BUCKET))
    site = AwsSite(endpoint_url=aws.url, root=str(image), metadata="http://127.0.0.1:9")
    lease = Lease(
        "life", f"aws:{REGION}", "g6.xlarge", "CPU x1", Market.ON_DEMAND, 0.8,
        LeaseState.PLANNED, NOW, fleet="aws", requested_at=NOW,
    )  # fmt: skip
    engine = EngineSpec(
        command=(f"{image}/engine/bin/vllm",), model_path=f"{image}/models/tiny",
        max_model_len=512, dtype="float32", kv_cache_bytes=128 * 2**20, block_size=32,
        arguments=("--enforce-eager",),
        environment={**ENVIRONMENT, "AWS_ENDPOINT_URL": aws.url}, weights=BUCKET,
    )  # fmt: skip
    node = NodeSpec(
        lease_id=lease.id, first_port=FIRST_PORT, node_class="CPU x1", tensor_parallel_size=1,
        data_parallel_size=1, batch=1, cores=("0",),
    )  # fmt: skip
    stage = StageSpec(first_layer=0, layers=LAYERS, nodes=(node,))
    replica = ReplicaSpec(id="r1", model=MODEL, phase=Phase.AGGREGATED, stages=(stage,))
    with Daemon(files.home, lease_s=60.0) as daemon:
        known = note_fleet(files, "cloud", AwsSite(endpoint_url=aws.url), [REGION])
        boots = Boots(files, site, LocalFleet(files.home).require_controller())
        fleet = AwsFleet(
            AwsClients(endpoint_url=aws.url), known.fleet_id, (REGION,), RegionSettings(),
            user_data=boots.script, nodes=lambda: read_nodes(files.nodes).nodes,
        )  # fmt: skip
        instance = fleet.launch(lease, NOW).instance_id
        content = Deployment(engines={MODEL: engine}, enrolling=(lease.id,), replicas=(replica,))
        write_deployment(files.deployment, content)
        place(instance, REGION, "127.0.0.1")

        def seen() -> Node:
            return read_nodes(files.nodes).nodes[lease.id]

        stub = StubNode.boot(instance, REGION, tmp_path / "instance")
        try:
            ends = time.monotonic() + START_S
            while time.monotonic() < ends and not read_routes(files.routes).routes:
                daemon.step(0.5)
            (route,) = read_routes(files.routes).routes
            body = {"model": MODEL, "prompt": "the reef is", "max_tokens": 8, "ignore_eos": True}
            answer = httpx.post(
                f"{route.urls[0]}/v1/completions", json=body, timeout=60, trust_env=False
            )
            assert answer.json()["usage"]["completion_tokens"] == 8
            while (
                time.monotonic() < ends and read_nodes(files.nodes).nodes["life"].engine_s is None
            ):
                daemon.step(0.5)
            found = seen().start_up(lease)
            assert found is not None and found.engine_s > found.weights_s > 0.0
            print(found)
            (one,) = fleet.instances(datetime.now(UTC))
            assert one.ready_at is not None and one.silent_s < 10.0
            write_deployment(files.deployment, Deployment())  # the lease ends
            while time.monotonic() < ends and stub.process.poll() is None:
                daemon.step(0.5)
            assert stub.process.poll() is not None
            (one,) = fleet.instances(datetime.now(UTC))
            assert one.state in {InstanceState.STOPPING, InstanceState.GONE}  # it shut itself down
        finally:
            stub.end()
            terminate_all(REGION)

"""From a template to the commands of its nodes, as values: Coral's pipelines (engine: coral).

A replica of one node and one stage is stock vLLM, one engine on each group of the node's GPUs. All
else is pipelines of `coral_vllm_pipeline`: as many as there are groups where every stage is one
node of equally many, and one pipeline otherwise, in which every group of every node is a node of
its stage. Its head, which answers requests, runs on the first node of the first stage. Every
replica that hands KV over is a pipeline, of a single stage too: they pair freely.
Source: executor/vllm_pipeline (layout.py, node.py, serve.py).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import zmq.utils.z85
from zmq import curve_public

from executor.control.keys import KeyPair
from executor.stage_plan import (
    PORTS_PER_GROUP,
    SHUTDOWN_S,
    EngineSettings,
    Host,
    ProcessPlan,
    ReplicaPlan,
    StagePlanError,
    devices,
    limits,
    plan_stages,
    weights_of,
)
from planner.types import Phase, Placement, Stage, StageNode

PACKAGE = "coral_vllm_pipeline"
LAYOUT = "CORAL_PIPELINE_LAYOUT"  # the package's layout.ENVIRONMENT
API_PORT, HEAD_PORT = 2, 3  # after the first of the node that the head is on
KV_CONNECTOR = {
    "kv_connector": "PipelineConnector",
    "kv_connector_module_path": f"{PACKAGE}.connector",
    "kv_role": "kv_both",
}


@dataclass(frozen=True, slots=True)
class Group:
    """One tensor parallel group: a node of a pipeline's stage."""

    host: Host
    node: StageNode
    number: int  # among its node's groups

    @property
    def port(self) -> int:
        width = self.node.tensor_parallel_size * PORTS_PER_GROUP
        return self.host.first_port + self.number * width


Part = tuple[Stage, Sequence[Group]]


def derived_keys(secret: str, purpose: str) -> KeyPair:
    """A pair of keys for one purpose, the same whenever it is asked for."""
    seed = hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).digest()
    own = zmq.utils.z85.encode(seed)
    return KeyPair(curve_public(own).decode("ascii"), own.decode("ascii"))


def plan_pipelines(
    replica_id: str,
    phase: Phase,
    placement: Placement,
    hosts: Sequence[Sequence[Host]],
    settings: EngineSettings,
    python: str,
    secret: str,
) -> ReplicaPlan:
    """The processes of a replica; `hosts` by stage and node, `python` has the package.

    Keys are derived from `secret`: the pipeline's own, and those of all of the model's replicas
    that hand KV over. Raises StagePlanError: other numbers of hosts than of nodes.
    """
    stages = placement.stages
    if [len(stage.nodes) for stage in stages] != [len(mine) for mine in hosts]:
        raise StagePlanError(f"replica {replica_id}: other numbers of hosts than of nodes")
    alone = len(stages) == 1 and len(stages[0].nodes) == 1
    if alone and phase is Phase.AGGREGATED:
        return plan_stages(replica_id, phase, placement, hosts[0], settings)
    processes: list[ProcessPlan] = []
    for number, parts in enumerate(_pipelines(stages, hosts)):
        keys = derived_keys(secret, f"pipeline {replica_id} {number}")
        kv = derived_keys(secret, f"kv {settings.served_name}")
        processes += _processes(f"pipe{number}", phase, parts, settings, python, keys, kv)
    return ReplicaPlan(replica_id, phase, tuple(processes))


def _pipelines(stages: Sequence[Stage], hosts: Sequence[Sequence[Host]]) -> list[list[Part]]:
    """Side by side where all stages are one node of equally many groups; else one."""
    groups = [
        [
            Group(host, node, number)
            for node, host in zip(stage.nodes, mine, strict=True)
            if node.batch > 0  # a node that the placement gives nothing
            for number in range(node.data_parallel_size)
        ]
        for stage, mine in zip(stages, hosts, strict=True)
    ]
    counts = {node.data_parallel_size for stage in stages for node in stage.nodes}
    if len(counts) == 1 and all(len(stage.nodes) == 1 for stage in stages):
        return [
            [(stage, [mine[number]]) for stage, mine in zip(stages, groups, strict=True)]
            for number in range(counts.pop())
        ]
    return [list(zip(stages, groups, strict=True))]


def _processes(
    name: str,
    phase: Phase,
    parts: Sequence[Part],
    settings: EngineSettings,
    python: str,
    keys: KeyPair,
    kv: KeyPair,
) -> list[ProcessPlan]:
    first = parts[0][1][0]
    layout = {
        "control": first.host.address,
        "port": first.port + HEAD_PORT,
        "public_key": keys.public,
        "secret_key": keys.secret,
        "transport": settings.transport,
        "kv_public_key": "" if phase is Phase.AGGREGATED else kv.public,
        "kv_secret_key": "" if phase is Phase.AGGREGATED else kv.secret,
        "stages": [
            {"layers": stage.layers, "nodes": [_node(group, settings) for group in groups]}
            for stage, groups in parts
        ],
    }
    shared = {LAYOUT: json.dumps(layout), "VLLM_USE_V2_MODEL_RUNNER": "0"}
    workers = []
    for s, (stage, groups) in enumerate(parts):
        path, prepare = weights_of(stage, settings)
        for n, group in enumerate(groups):
            workers.append(
                ProcessPlan(
                    name=f"{name}-stage{s}-node{n}",
                    lease_id=group.host.lease_id,
                    argv=(python, "-m", f"{PACKAGE}.node", "-", str(s), str(n), path),
                    environment=_environment(group, settings, shared),
                    api_url=None,
                    prepare=prepare,
                )
            )
    return [_head(name, phase, parts, settings, python, shared), *workers]


def _node(group: Group, settings: EngineSettings) -> Mapping[str, object]:
    host, tp = group.host, group.node.tensor_parallel_size
    kv = settings.kv_cache_bytes if host.kv_cache_bytes is None else host.kv_cache_bytes
    return {
        "host": host.address,
        "port": group.port,
        "tensor_parallel_size": tp,
        "weight": group.node.batch / group.node.data_parallel_size,
        "kv_bytes": kv or 0,
        "cores": host.cores[group.number * tp : (group.number + 1) * tp],
        "workers_here": tp * group.node.data_parallel_size,
    }


def _environment(
    group: Group, settings: EngineSettings, shared: Mapping[str, str]
) -> Mapping[str, str]:
    cores = (
        {}
        if group.host.cores
        else devices(group.host, group.number, group.node.tensor_parallel_size)
    )  # the layout binds cores
    address = {"VLLM_HOST_IP": group.host.address}
    return {**settings.environment, **address, **cores, **shared}


def _head(
    name: str,
    phase: Phase,
    parts: Sequence[Part],
    settings: EngineSettings,
    python: str,
    shared: Mapping[str, str],
) -> ProcessPlan:
    """The server: it schedules and holds no layers."""
    stage, (first, *_) = parts[0]
    path, prepare = weights_of(stage, settings)
    port = first.port + API_PORT
    one_each = all(len(groups) == 1 for _, groups in parts)
    argv = [
        python, "-m", f"{PACKAGE}.serve", "-", path,
        "--served-model-name", settings.served_name,
        "--host", first.host.address, "--port", str(port),
        "--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len),
        "--shutdown-timeout", str(SHUTDOWN_S),
        "--enable-prefix-caching" if one_each else "--no-enable-prefix-caching",
        *limits(first.host, settings),
    ]  # fmt: skip
    if phase is not Phase.AGGREGATED:
        argv += ["--kv-transfer-config", json.dumps(KV_CONNECTOR)]
    threads = {"OMP_NUM_THREADS": "1"} if first.host.cores else {}
    return ProcessPlan(
        name=f"{name}-head",
        lease_id=first.host.lease_id,
        argv=(*argv, *settings.arguments),
        environment={**_environment(first, settings, shared), **threads},
        api_url=f"http://{first.host.address}:{port}",
        prepare=prepare,
    )

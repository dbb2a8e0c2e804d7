"""From a template to the exact commands of its nodes, as values: stock vLLM 0.32.

One process runs on every (node, group): a single-node replica is one or more engines, each on one
group of the node's GPUs; a pipeline has one engine over all its nodes, whose first stage answers
requests and whose others are headless. Prefill and decode replicas hand KV over through a
connector. Nothing is started here.
Source: vLLM 0.32 command line, as tried on CPU (docs/operations.md, Running vLLM).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from planner.errors import CoralError
from planner.types import Phase, Placement, Stage

MASTER_PORT, SIDE_CHANNEL_PORT = 1, 2  # after the group's first port
PORTS_PER_GROUP = 10  # NIXL uses one side channel port per worker
EXECUTE_TIMEOUT_S = 8  # a lost stage fails its requests after so long, not after 300 s
SHUTDOWN_S = 60  # for requests in flight once routing has stopped


class StagePlanError(CoralError):
    """A placement that this engine cannot run; the planner should not have offered it."""


class Connector(StrEnum):
    """How KV moves from prefill to decode."""

    NIXL = "nixl"
    FOLDER = "folder"  # a folder that both sides see: where NIXL cannot be installed


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How vLLM is started, the same for all replicas of a workload."""

    command: tuple[str, ...]  # ('vllm',), or an interpreter with a launcher
    model_path: str  # a folder or name that every node can read; with `weights` it fetches there
    served_name: str
    max_model_len: int  # tokens
    dtype: str = "auto"
    kv_cache_bytes: int | None = None  # per GPU; None: vLLM measures what is left
    max_num_seqs: int | None = None  # requests in flight of one engine; None: vLLM's own
    max_num_batched_tokens: int | None = None  # new tokens of one step
    block_size: int | None = None  # tokens
    connector: Connector = Connector.NIXL
    kv_folder: str = ""  # of Connector.FOLDER
    kv_device: str = "cuda"  # 'cpu' on CPU nodes
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""  # where the model was pushed to; '': it lies at model_path
    transport: str = "zmq"  # of hidden states between a pipeline's nodes: zmq, gloo or nccl


@dataclass(frozen=True, slots=True)
class Host:
    """Where the processes of one lease run."""

    lease_id: str
    address: str
    first_port: int  # this lease's own ports begin here
    cores: tuple[str, ...] = ()  # CPU nodes: the cores of every group, '0-3'
    kv_cache_bytes: int | None = None  # per GPU of this node; None: the settings'


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process of one node."""

    name: str  # of the process within its replica: 'stage0-group0'
    lease_id: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    api_url: str | None  # where it answers requests; None: headless
    prepare: tuple[str, ...] = ()  # a command of Coral's that becomes `argv` when it is done


@dataclass(frozen=True)
class ReplicaPlan:
    """All processes of a replica; they start and end together."""

    replica_id: str
    phase: Phase
    processes: tuple[ProcessPlan, ...]

    @cached_property
    def digest(self) -> str:
        """Equal for plans with equal processes."""
        parts = [
            (p.name, p.lease_id, p.argv, sorted(p.environment.items()), p.prepare)
            for p in self.processes
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @cached_property
    def leases(self) -> frozenset[str]:
        return frozenset(process.lease_id for process in self.processes)

    @property
    def api_urls(self) -> tuple[str, ...]:
        return tuple(process.api_url for process in self.processes if process.api_url)

    def on(self, lease_id: str) -> tuple[ProcessPlan, ...]:
        """Processes of one node."""
        return tuple(process for process in self.processes if process.lease_id == lease_id)


def plan_stages(
    replica_id: str,
    phase: Phase,
    placement: Placement,
    hosts: Sequence[Host],
    settings: EngineSettings,
) -> ReplicaPlan:
    """The processes of a replica; `hosts` has one host per stage, in the order of the stages.

    Raises StagePlanError: several nodes in a stage, stages of unequal groups, a pipeline of a
    prefill or decode replica, or another number of hosts than stages.
    """
    stages = placement.stages
    _refuse(replica_id, phase, stages, hosts)
    groups = stages[0].nodes[0].data_parallel_size
    processes = [
        _process(rank, group, phase, stages, hosts, settings)
        for group in range(groups)
        for rank in range(len(stages))
    ]
    return ReplicaPlan(replica_id, phase, tuple(processes))


def _refuse(replica_id: str, phase: Phase, stages: Sequence[Stage], hosts: Sequence[Host]) -> None:
    where = f"replica {replica_id}"
    if any(len(stage.nodes) != 1 for stage in stages):
        raise StagePlanError(
            f"{where}: stock vLLM runs one node per stage; plan with engine: vllm, or run it with "
            "engine: coral"
        )
    shapes = {
        (stage.nodes[0].tensor_parallel_size, stage.nodes[0].data_parallel_size) for stage in stages
    }
    if len(shapes) != 1:
        raise StagePlanError(
            f"{where}: stock vLLM gives all stages one tensor parallel size and one number of "
            "groups; plan with engine: vllm, or run it with engine: coral"
        )
    if len(stages) > 1 and phase is not Phase.AGGREGATED:
        raise StagePlanError(
            f"{where}: stock vLLM hands KV over between replicas of one stage only; plan with "
            "engine: vllm, or run it with engine: coral"
        )
    if len(hosts) != len(stages):
        raise StagePlanError(f"{where}: {len(stages)} stages, but {len(hosts)} hosts")


def _process(
    rank: int,
    group: int,
    phase: Phase,
    stages: Sequence[Stage],
    hosts: Sequence[Host],
    settings: EngineSettings,
) -> ProcessPlan:
    host, head = hosts[rank], hosts[0]
    port = host.first_port + group * PORTS_PER_GROUP
    node = stages[rank].nodes[0]
    model_path, prepare = weights_of(stages[rank], settings)
    argv = [
        *settings.command, "serve", model_path,
        "--served-model-name", settings.served_name,
        "--host", host.address, "--port", str(port),
        "--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len),
        "--tensor-parallel-size", str(node.tensor_parallel_size),
        "--shutdown-timeout", str(SHUTDOWN_S),
    ]  # fmt: skip
    argv += limits(host, settings)
    environment = {
        **settings.environment,
        "VLLM_HOST_IP": host.address,
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(EXECUTE_TIMEOUT_S),
        **devices(host, group, node.tensor_parallel_size),
    }
    if len(stages) > 1:
        master = head.first_port + group * PORTS_PER_GROUP + MASTER_PORT
        argv += [
            "--pipeline-parallel-size", str(len(stages)), "--nnodes", str(len(stages)),
            "--node-rank", str(rank), "--master-addr", head.address, "--master-port", str(master),
            "--distributed-executor-backend", "mp",
        ]  # fmt: skip
        layers = ",".join(str(stage.layers) for stage in stages)
        environment["VLLM_PP_LAYER_PARTITION"] = layers
    if phase is not Phase.AGGREGATED:
        argv += ["--kv-transfer-config", json.dumps(_kv_transfer(settings))]
        environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host.address
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port + SIDE_CHANNEL_PORT)
    headless = rank > 0
    argv += ["--headless"] if headless else []
    return ProcessPlan(
        name=f"stage{rank}-group{group}",
        lease_id=host.lease_id,
        argv=(*argv, *settings.arguments),
        environment=environment,
        api_url=None if headless else f"http://{host.address}:{port}",
        prepare=prepare,
    )


def weights_of(stage: Stage, settings: EngineSettings) -> tuple[str, tuple[str, ...]]:
    """The stage's own folder, and the fetch of its layers; the shared folder without."""
    if not settings.weights:
        return settings.model_path, ()
    last = stage.first_layer + stage.layers - 1
    folder = f"{settings.model_path}/layers-{stage.first_layer}-{last}"
    layers = ("--first-layer", str(stage.first_layer), "--layers", str(stage.layers))
    return folder, ("weights", "fetch", settings.weights, folder, *layers)


def limits(host: Host, settings: EngineSettings) -> list[str]:
    """What an engine may use; what is None is left to vLLM."""
    kv = settings.kv_cache_bytes if host.kv_cache_bytes is None else host.kv_cache_bytes
    values = {
        "--kv-cache-memory-bytes": kv,
        "--block-size": settings.block_size,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
    }
    given = {name: value for name, value in values.items() if value is not None}
    return [word for name, value in given.items() for word in (name, str(value))]


def devices(host: Host, group: int, tensor_parallel_size: int) -> Mapping[str, str]:
    """GPUs of a group, or its cores where the host names them."""
    if host.cores:
        return {"VLLM_CPU_OMP_THREADS_BIND": host.cores[group]}
    first = group * tensor_parallel_size
    numbers = range(first, first + tensor_parallel_size)
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))}


def _kv_transfer(settings: EngineSettings) -> Mapping[str, object]:
    if settings.connector is Connector.NIXL:
        return {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": settings.kv_device,
        }
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": settings.kv_folder},
    }

"""What a pipeline looks like: stages, their nodes, and where everybody listens."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import PipelineError

ENVIRONMENT = "CORAL_PIPELINE_LAYOUT"  # the layout as JSON, or the path of its file
PLACE = "CORAL_PIPELINE_PLACE"  # of a worker's process: 'stage,node,rank'
HERE = "-"  # as a command's LAYOUT: it is in the environment
TRANSPORTS = ("zmq", "gloo", "nccl")
LOOPBACK = {"127.0.0.1", "localhost"}
PORTS_PER_RANK = 10  # of which a worker uses two


@dataclass(frozen=True)
class Node:
    """One node of a stage: a tensor parallel group."""

    host: str
    port: int  # the first of its own; each rank has PORTS_PER_RANK
    tensor_parallel_size: int
    weight: float = 1.0  # of the stage's requests
    kv_bytes: int = 0  # of each of its GPUs; 0: the engine's --kv-cache-memory-bytes
    cores: tuple[str, ...] = ()  # CPU nodes: of every worker, '0-3'
    workers_here: int = 0  # on its machine, those of other pipelines too; 0: this one's

    def hidden(self, rank: int) -> str:
        """Where a worker takes hidden states."""
        return f"tcp://{self.host}:{self.port + rank * PORTS_PER_RANK}"

    def kv(self, rank: int) -> str:
        """Where a worker gives its KV to decode replicas."""
        return f"tcp://{self.host}:{self.port + rank * PORTS_PER_RANK + 1}"


@dataclass(frozen=True)
class Stage:
    """Some layers, on one node or several."""

    layers: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Layout:
    """All of it."""

    control: str  # host of the head
    port: int  # the head's commands; replies come to the next one, torch.distributed to the third
    stages: tuple[Stage, ...]
    public_key: str = ""  # CURVE, of the head and of all nodes; '': on this machine alone
    secret_key: str = ""
    transport: str = "zmq"  # of hidden states; the others go unencrypted, by torch.distributed
    kv_public_key: str = ""  # CURVE, of all replicas that hand KV over to each other
    kv_secret_key: str = ""

    def __post_init__(self) -> None:
        if not self.stages:
            raise PipelineError("a pipeline has one stage at least")
        for number, stage in enumerate(self.stages):
            if stage.layers < 1 or not stage.nodes:
                raise PipelineError(f"stage {number} has no layers or no nodes")
            for node in stage.nodes:
                if node.tensor_parallel_size < 1:
                    raise PipelineError(
                        f"stage {number}: tensor parallel size {node.tensor_parallel_size}"
                    )
                if not node.weight > 0:
                    raise PipelineError(f"stage {number}: a node of weight {node.weight}")
        if self.transport not in TRANSPORTS:
            known = ", ".join(TRANSPORTS)
            raise PipelineError(f"unknown transport {self.transport!r}: one of {known}")
        if not self.public_key and not self.is_here:
            raise PipelineError("a pipeline over machines needs keys: hidden states are requests'")

    @property
    def is_here(self) -> bool:
        """Whether all of it is on this machine, and reached by nobody else."""
        hosts = {node.host for stage in self.stages for node in stage.nodes}
        return {self.control, *hosts} <= LOOPBACK

    def workers_beside(self, node: Node) -> int:
        """Workers that share its machine's memory, itself included."""
        mine = [
            one.tensor_parallel_size
            for stage in self.stages
            for one in stage.nodes
            if one.host == node.host
        ]
        return max(node.workers_here, sum(mine))

    def require_kv_keys(self) -> None:
        """Raises PipelineError: anybody could ask this replica for the KV of requests."""
        if not self.kv_public_key and not self.is_here:
            raise PipelineError(
                "prefill and decode over machines need kv_public_key and kv_secret_key in the "
                "layout, the same in all replicas: KV is requests'"
            )

    @property
    def commands(self) -> str:
        return f"tcp://{self.control}:{self.port}"

    @property
    def replies(self) -> str:
        return f"tcp://{self.control}:{self.port + 1}"

    @property
    def rendezvous(self) -> tuple[str, int]:
        """Where the workers find each other for torch.distributed: at the first one."""
        return self.stages[0].nodes[0].host, self.port + 2

    @property
    def partition(self) -> str:
        """Layers of every stage, as vLLM's VLLM_PP_LAYER_PARTITION has them."""
        return ",".join(str(stage.layers) for stage in self.stages)

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """(stage, node, rank) of every worker, in order."""
        return [
            (s, n, rank)
            for s, stage in enumerate(self.stages)
            for n, node in enumerate(stage.nodes)
            for rank in range(node.tensor_parallel_size)
        ]

    @property
    def is_shared(self) -> bool:
        """Whether some stage has several nodes."""
        return any(len(stage.nodes) > 1 for stage in self.stages)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def write(self, path: Path) -> None:
        """For its owner's eyes: it has keys."""
        path.touch(mode=0o600)
        path.chmod(0o600)  # one that was there
        path.write_text(self.to_json())


def read_layout(source: str | Path) -> Layout:
    """Of a file, of JSON text, or of the environment (`-`).

    Raises PipelineError: it is none.
    """
    text, where = str(source), str(source)
    if text == HERE:
        text, where = os.environ.get(ENVIRONMENT, ""), ENVIRONMENT
    try:
        known = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
        return Layout(**{**known, "stages": tuple(_stage(stage) for stage in known["stages"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PipelineError(f"{where} is no layout of a pipeline ({error})") from error


def place_layout(source: str) -> Layout:
    """Of a command's LAYOUT, which processes it starts find in the environment.

    Raises PipelineError, as `read_layout`.
    """
    found = read_layout(source)
    if source != HERE:
        os.environ[ENVIRONMENT] = found.to_json()
    return found


def _stage(known: dict[str, Any]) -> Stage:
    nodes = tuple(Node(**{**node, "cores": tuple(node["cores"])}) for node in known["nodes"])
    return Stage(known["layers"], nodes)

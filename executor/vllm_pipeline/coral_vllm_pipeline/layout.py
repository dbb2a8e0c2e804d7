"""What a pipeline looks like: stages, their nodes, and where everybody listens."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import PipelineError

ENVIRONMENT = "CORAL_PIPELINE_LAYOUT"  # path of the layout's file
PORTS_PER_NODE = 10  # one per worker, for hidden states


@dataclass(frozen=True)
class Node:
    """One node of a stage."""

    host: str
    port: int  # the first of its own
    tensor_parallel_size: int
    weight: float = 1.0  # of the stage's requests
    kv_bytes: int = 0  # of each of its GPUs; 0: the engine's --kv-cache-memory-bytes
    cores: tuple[str, ...] = ()  # CPU nodes: of every worker, '0-3'

    def hidden(self, rank: int) -> str:
        """Where a worker takes hidden states."""
        return f"tcp://{self.host}:{self.port + rank}"


@dataclass(frozen=True)
class Stage:
    """Some layers, on one node or several."""

    layers: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Layout:
    """All of it."""

    control: str  # host of the head
    port: int  # the head's commands; replies come to the next one
    stages: tuple[Stage, ...]
    public_key: str = ""  # CURVE, of the head and of all nodes; '': on this machine alone
    secret_key: str = ""

    def __post_init__(self) -> None:
        if len(self.stages) < 2:
            raise PipelineError("a pipeline has two stages at least; one runs as plain vLLM")
        for number, stage in enumerate(self.stages):
            if stage.layers < 1 or not stage.nodes:
                raise PipelineError(f"stage {number} has no layers or no nodes")
            for node in stage.nodes:
                if not 1 <= node.tensor_parallel_size <= PORTS_PER_NODE:
                    raise PipelineError(
                        f"stage {number}: tensor parallel size {node.tensor_parallel_size}"
                    )
        if not self.public_key and self.control not in {"127.0.0.1", "localhost"}:
            raise PipelineError("a pipeline over machines needs keys: hidden states are requests'")

    @property
    def commands(self) -> str:
        return f"tcp://{self.control}:{self.port}"

    @property
    def replies(self) -> str:
        return f"tcp://{self.control}:{self.port + 1}"

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

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1))


def read_layout(path: Path) -> Layout:
    """Raises PipelineError: it is none."""
    try:
        known = json.loads(path.read_text())
        return Layout(**{**known, "stages": tuple(_stage(stage) for stage in known["stages"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PipelineError(f"{path} is no layout of a pipeline ({error})") from error


def _stage(known: dict[str, Any]) -> Stage:
    nodes = tuple(Node(**{**node, "cores": tuple(node["cores"])}) for node in known["nodes"])
    return Stage(known["layers"], nodes)

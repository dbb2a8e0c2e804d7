"""What the controller is to run: replicas with their placements and nodes, as one JSON file.

Whoever deploys writes it whole, as `coral operate` does for a local fleet; the controller reads it
when it changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from executor.files import UnreadableError, read_model, write_model
from executor.pipeline_plan import plan_pipelines
from executor.routes import Objective
from executor.stage_plan import (
    Connector,
    EngineSettings,
    Host,
    ReplicaPlan,
    StagePlanError,
    plan_stages,
)
from planner.errors import InputError
from planner.types import Phase, Placement, Stage, StageNode

LARGEST_BLOCK_TOKENS = 128  # of vLLM's own choice


class DeploymentError(InputError):
    """A deployment file that can't be read."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineSpec(_Model):
    """How the engine of one model is started."""

    command: tuple[str, ...]
    model_path: str
    max_model_len: int
    dtype: str = "auto"
    kv_cache_bytes: int | None = None
    block_size: int | None = None
    connector: Connector = Connector.NIXL
    kv_folder: str = ""
    kv_device: str = "cuda"
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    weights: str = ""  # where nodes fetch their layers from
    pipeline_python: str = ""  # has coral_vllm_pipeline, which runs all pipelines; '': stock vLLM
    transport: str = "zmq"  # of pipeline_python's hidden states

    def settings(self, served_name: str) -> EngineSettings:
        values = self.model_dump(exclude={"pipeline_python"})
        return EngineSettings(served_name=served_name, **values)


class NodeSpec(_Model):
    """One node of a stage, and where it runs."""

    lease_id: str
    address: str = ""  # '': where the node enrolled from
    first_port: Annotated[int, Field(gt=0, lt=65536)]
    node_class: str
    tensor_parallel_size: int
    data_parallel_size: int
    batch: int
    cores: tuple[str, ...] = ()
    kv_cache_bytes: int | None = None  # of each of its GPUs; None: the engine's


class StageSpec(_Model):
    """A layer range and its nodes."""

    first_layer: int
    layers: int
    nodes: tuple[NodeSpec, ...]


class ReplicaSpec(_Model):
    """One replica to run."""

    id: str
    model: str  # the name that requests give
    engine: str = ""  # how it is started, by its name in the deployment; '': its model's
    phase: Phase
    stages: tuple[StageSpec, ...]
    domain: str = ""  # where its nodes are
    template_id: str = ""  # what it runs; gateways say how that does
    # The router's weight, of its model's requests: aggregated and decode replicas together make 1,
    # prefill ones what decode ones do.
    share: float = 1.0
    max_num_seqs: int | None = None  # of each engine; None: vLLM's own
    max_num_batched_tokens: int | None = None
    kv_tokens: int | None = None  # that the stage with the least room holds; None: not known

    @property
    def lease_ids(self) -> frozenset[str]:
        return frozenset(node.lease_id for stage in self.stages for node in stage.nodes)

    def at(self, addresses: Mapping[str, str]) -> ReplicaSpec | None:
        """The same with the addresses of nodes that enrolled; None where one did not yet."""
        stages = []
        for stage in self.stages:
            nodes = []
            for node in stage.nodes:
                address = node.address or addresses.get(node.lease_id)
                if not address:
                    return None
                nodes.append(node.model_copy(update={"address": address}))
            stages.append(stage.model_copy(update={"nodes": tuple(nodes)}))
        return self.model_copy(update={"stages": tuple(stages)})

    def _longest(self, engine: EngineSpec) -> int:
        """Tokens of a request: vLLM does not start where its KV can't hold one of that length.

        One block is vLLM's own.
        """
        if self.kv_tokens is None:
            return engine.max_model_len
        block = engine.block_size or LARGEST_BLOCK_TOKENS
        return min(engine.max_model_len, max(1, self.kv_tokens // block - 1) * block)

    def plan(self, engine: EngineSpec, secret: str) -> ReplicaPlan:
        """Its processes; a pipeline's keys are derived from the secret.

        Raises StagePlanError: the engine can't run it.
        """
        stages = tuple(
            Stage(
                stage.first_layer,
                stage.layers,
                tuple(
                    StageNode(n.node_class, n.tensor_parallel_size, n.data_parallel_size, n.batch)
                    for n in stage.nodes
                ),
            )
            for stage in self.stages
        )
        hosts = [
            [
                Host(node.lease_id, node.address, node.first_port, node.cores, node.kv_cache_bytes)
                for node in stage.nodes
            ]
            for stage in self.stages
        ]
        placement = Placement(stages, 1, 1, 0.0, 0.0, 0.0)
        settings = replace(
            engine.settings(self.model),
            max_model_len=self._longest(engine),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )
        if engine.pipeline_python:
            return plan_pipelines(
                self.id, self.phase, placement, hosts, settings, engine.pipeline_python, secret
            )
        first = [mine[0] for mine in hosts if mine]
        return plan_stages(self.id, self.phase, placement, first, settings)


class Plans(NamedTuple):
    """What replicas of a deployment run, by their ids, and why others cannot."""

    runnable: Mapping[str, ReplicaPlan]
    refused: Mapping[str, str]


class Deployment(_Model):
    """Everything that is to run."""

    objectives: dict[str, Objective] = Field(default_factory=dict)  # by model
    engines: dict[str, EngineSpec] = Field(default_factory=dict)  # by the name that replicas give
    lease_keys: dict[str, str] = Field(default_factory=dict)  # public keys by lease id
    enrolling: tuple[str, ...] = ()  # leases whose nodes make their keys themselves
    replicas: tuple[ReplicaSpec, ...] = ()

    @property
    def lease_ids(self) -> frozenset[str]:
        return frozenset((*self.lease_keys, *self.enrolling))

    def keys(self, enrolled: Mapping[str, str]) -> dict[str, str]:
        """Public keys by lease; `enrolled` has those of nodes that made theirs themselves."""
        own = {name: enrolled[name] for name in self.enrolling if name in enrolled}
        return {**self.lease_keys, **own}

    def without(self, lease_id: str) -> Deployment:
        """The same without a lease and the replicas on it."""
        return self.model_copy(
            update={
                "lease_keys": {k: v for k, v in self.lease_keys.items() if k != lease_id},
                "enrolling": tuple(name for name in self.enrolling if name != lease_id),
                "replicas": tuple(r for r in self.replicas if lease_id not in r.lease_ids),
            }
        )

    def plans(self, secret: str, addresses: Mapping[str, str] | None = None) -> Plans:
        """Processes of every replica, as far as its nodes' addresses are known.

        Keys that pipelines need are derived from the secret.
        """
        found, refused = {}, {}
        for replica in self.replicas:
            name = replica.engine or replica.model
            if name not in self.engines:
                refused[replica.id] = f"the deployment has no engine for {name!r}"
                continue
            placed = replica.at(addresses or {})
            if placed is None:
                continue
            try:
                found[replica.id] = placed.plan(self.engines[name], secret)
            except (StagePlanError, IndexError) as error:
                refused[replica.id] = f"it can't be run: {error}"
        return Plans(found, refused)


def read_deployment(path: Path) -> Deployment:
    """The file; an empty deployment where there is none.

    Raises DeploymentError: not a deployment.
    """
    try:
        return read_model(path, Deployment)
    except UnreadableError as error:
        raise DeploymentError(
            f"{path} is not a deployment of Coral ({error}); write it anew, whole"
        ) from error


def write_deployment(path: Path, deployment: Deployment) -> None:
    """Whole or not at all."""
    write_model(path, deployment)


def withdraw(path: Path, lease_id: str) -> None:
    """Take a lease out of the deployment, with the replicas on it."""
    known = read_deployment(path)
    if lease_id in known.lease_ids:
        write_deployment(path, known.without(lease_id))

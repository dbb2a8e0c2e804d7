"""A local site: nodes of this machine as a market of their own, and how engines start on them.

What a scenario says under `fleet` with `kind: local`, and what it adds to what the catalog knows.
Source: docs/operations.md, Running vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from planner.errors import ScenarioError, UnknownNameError
from planner.known import Known, MarketRow
from planner.strict import Strict
from planner.types import InstanceType, Link, Market, NodeClass, Workload

CLOUD = "local"
STOCK_NOTE = "nodes of this machine, as the scenario says"


class LocalNodeSpec(Strict):
    """Nodes of one kind. A node is groups of cores; a group stands for one GPU."""

    instance_type: str
    gpu: str  # as in node classes: 'CPU-a' of 'CPU-a x1'
    profile: str = "CPU"  # the GPU type whose tables it has
    memory_gib: PositiveFloat  # of one group, for weights and KV
    price_usd_per_hour: PositiveFloat
    cores: Annotated[tuple[tuple[str, ...], ...], Field(min_length=1)]  # by node, by group: '0-3'
    network_gbit_per_s: PositiveFloat = 10.0

    @model_validator(mode="after")
    def _equal_nodes(self) -> LocalNodeSpec:
        if {len(groups) for groups in self.cores} != {self.groups} or not self.groups:
            raise ValueError(f"nodes of {self.instance_type} must have equal numbers of groups")
        return self

    @property
    def groups(self) -> int:
        return len(self.cores[0])

    @property
    def node_class(self) -> str:
        return f"{self.gpu} x{self.groups}"


class RandomModelSpec(Strict):
    """A small Llama with random weights, made where its folder is not there."""

    layers: Annotated[int, Field(ge=1, le=64)] = 4
    hidden: Annotated[int, Field(ge=64, le=4096, multiple_of=64)] = 256


class LocalEngineSpec(Strict):
    """How vLLM is started for one model."""

    path: str  # the model's folder; relative to Coral's home
    weights: str = ""  # where it was pushed to: nodes fetch their layers from there
    python: str = ".venv-vllm/bin/python"  # of the environment that has vLLM
    dtype: str = "auto"
    max_model_len: PositiveInt
    block_size: PositiveInt = 32
    connector: Literal["nixl", "folder"] = "nixl"  # of engine: vllm
    transport: Literal["zmq", "gloo"] = "zmq"  # of engine: coral
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    random: RandomModelSpec | None = None


class LocalSite(Strict):
    """All nodes of this machine that a scenario may use, in one domain."""

    domain: str = "local:here"
    nodes: tuple[LocalNodeSpec, ...] = ()
    engines: dict[str, LocalEngineSpec] = Field(default_factory=dict)  # by model

    @model_validator(mode="after")
    def _consistent(self) -> LocalSite:
        names = [node.instance_type for node in self.nodes]
        if len(set(names)) < len(names):
            raise ValueError("every instance_type of a local site has one entry")
        kinds: dict[str, tuple[str, float]] = {}
        for node in self.nodes:
            kind = (node.profile, node.memory_gib)
            if kinds.setdefault(node.node_class, kind) != kind:
                raise ValueError(
                    f"{node.node_class} has two sizes of memory or profiles; name their gpu apart"
                )
        if self.nodes and not self.domain.startswith(f"{CLOUD}:"):
            raise ValueError(f"a local site's domain starts with '{CLOUD}:'")
        return self


def with_site(known: Known, site: LocalSite, levels: Sequence[str], where: str) -> Known:
    """What is known, and the site's instance types with their prices and stock.

    Raises UnknownNameError: a profile that the catalog has no GPU type of.
    """
    kinds, prices, stock = list(known.instance_types), list(known.prices), dict(known.stock)
    for node in site.nodes:
        if node.profile not in known.gpus:
            place = f"the local site of {where} (`coral serve-local` measures this machine's)"
            raise UnknownNameError("GPU profile", node.profile, known.gpus, place)
        gpu = replace(known.gpus[node.profile], name=node.gpu, memory_gib=node.memory_gib)
        network = node.network_gbit_per_s
        made = NodeClass(node.node_class, gpu, node.groups, Link.NONE, network, network)
        kinds.append(InstanceType(CLOUD, node.instance_type, node.groups, made))
        prices.append(
            MarketRow(
                domain=site.domain,
                zone=None,
                instance_type=node.instance_type,
                node_class=node.node_class,
                market=Market.ON_DEMAND,
                price_usd_per_hour=node.price_usd_per_hour,
            )
        )
        stock |= {(level, site.domain, node.instance_type): len(node.cores) for level in levels}
    return replace(known, instance_types=kinds, prices=prices, stock=stock)


def check_engines(site: LocalSite, workloads: Sequence[Workload], where: str) -> None:
    """Every workload's model must be startable here.

    Raises ScenarioError: a model without an engine, or requests longer than it takes.
    """
    for workload in workloads:
        name, lengths = workload.model.name, workload.lengths
        if name not in site.engines:
            raise ScenarioError(
                f"{where}: fleet.engines does not say how {name!r} is started; add it there"
            )
        longest = lengths.p95_input + lengths.p95_output
        if longest > site.engines[name].max_model_len:
            raise ScenarioError(
                f"{where}: requests of {workload.name!r} have up to {longest:g} tokens (p95), more "
                f"than max_model_len of its engine ({site.engines[name].max_model_len}); raise it"
            )

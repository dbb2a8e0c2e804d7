"""Domain types: frozen, with units in their names, refusing nonsense.

GiB is 2**30 bytes, GB/s is 1e9 bytes/s, Gbit/s is 1e9 bits/s, TFLOP/s is 1e12 FLOP/s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """What a template serves of a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"  # both, in mixed steps on the same nodes

    @property
    def in_cycles(self) -> bool:
        """Whether requests stay for many steps (decode, aggregated) rather than one."""
        return self is not Phase.PREFILL


DISAGGREGATED = (Phase.PREFILL, Phase.DECODE)


class Market(StrEnum):
    """How a node is paid for."""

    ON_DEMAND = "on_demand"
    SPOT = "spot"
    OWNED = "owned"  # reserved or on premises: no marginal price, a stock of its own


class Provenance(StrEnum):
    """Where a performance number comes from, best first."""

    MEASURED = "measured"
    CALIBRATED = "calibrated"
    ESTIMATED = "estimated"

    @staticmethod
    def worst(*sources: Provenance) -> Provenance:
        """The least trustworthy of several sources."""
        order = list(Provenance)
        return max(sources, key=order.index)


class Link(StrEnum):
    """How the GPUs of one node talk to each other."""

    NONE = "none"
    PCIE = "pcie"
    NVSWITCH = "nvswitch"


def require_positive(owner: str, **values: float) -> None:
    """Raise ValueError unless every value is a positive finite number."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{owner}: {name} must be positive, got {value}")


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU type."""

    name: str  # the market's name: 'L4', 'H100', 'A100-80GB'
    profile_name: str  # the name in the performance tables: 'L4-24GB'
    memory_gib: float
    memory_bandwidth_gbyte_per_s: float
    half_tflops: float  # dense bf16, or fp16 where the card has no bf16
    power_w: float
    compute_capability: float

    def __post_init__(self) -> None:
        require_positive(
            self.name,
            memory_gib=self.memory_gib,
            memory_bandwidth_gbyte_per_s=self.memory_bandwidth_gbyte_per_s,
            half_tflops=self.half_tflops,
        )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and bytes of one model, as in its config.json."""

    name: str
    dtype: str  # of the shipped weights; the bytes below are theirs
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int
    experts_per_token: int
    moe_intermediate: int
    vocab: int
    weight_bytes: float  # of one non-expert parameter
    expert_weight_bytes: float  # of one expert parameter
    bytes_per_layer: int  # whole layer, before tensor parallelism
    embed_bytes: int
    lm_head_bytes: int
    kv_bytes_per_token_per_layer: int  # 16-bit KV, before tensor parallelism
    hop_bytes_per_token: int  # what vLLM sends between pipeline stages

    def __post_init__(self) -> None:
        require_positive(self.name, layers=self.layers, hidden=self.hidden, heads=self.heads)

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    def kv_shards(self, tp: int) -> int:
        """Over how many GPUs of a tensor parallel group one token's KV is split."""
        latent = self.kv_bytes_per_token_per_layer < 4 * self.kv_heads * self.head_dim
        return 1 if latent else min(tp, self.kv_heads)  # MLA's latent is kept on every rank

    @property
    def total_bytes(self) -> int:
        return self.layers * self.bytes_per_layer + self.embed_bytes + self.lm_head_bytes

    @property
    def short_name(self) -> str:
        return self.name.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Nodes that behave alike, whatever the cloud: equal GPU, count, host link and network."""

    name: str  # 'L4 x4'
    gpu: GpuSpec
    gpu_count: int
    link: Link
    network_peak_gbit_per_s: float  # what a short transfer sees
    network_baseline_gbit_per_s: float  # what can be sustained

    def __post_init__(self) -> None:
        require_positive(
            self.name,
            gpu_count=self.gpu_count,
            network_peak_gbit_per_s=self.network_peak_gbit_per_s,
            network_baseline_gbit_per_s=self.network_baseline_gbit_per_s,
        )

    @property
    def memory_gib(self) -> float:
        return self.gpu.memory_gib * self.gpu_count


@dataclass(frozen=True, slots=True)
class InstanceType:
    """What a cloud rents, and the node class that it is an instance of."""

    cloud: str
    name: str
    vcpus: int
    node: NodeClass  # with this instance type's own network


@dataclass(frozen=True, slots=True)
class Offer:
    """Nodes of one instance type that can be rented in one domain and market."""

    domain: str  # 'aws:us-east-1'
    instance_type: str
    node_class: str
    market: Market
    price_usd_per_hour: float
    stock: int  # nodes; the larger of a domain's and type's spot and on-demand stock is of both
    stock_source: str  # 'assumed: level limited' or where it was observed
    zone: str | None = None
    gpus: int = 1  # of one node
    vcpus: int = 0  # of one node; quotas count them

    def __post_init__(self) -> None:
        name = f"offer {self.domain} {self.instance_type} {self.market}"
        if self.market is not Market.OWNED:
            require_positive(name, price_usd_per_hour=self.price_usd_per_hour)
        elif self.price_usd_per_hour != 0:
            raise ValueError(f"{name}: owned nodes have no price, got {self.price_usd_per_hour}")
        if self.stock < 0:
            raise ValueError(f"offer {self.domain} {self.instance_type}: negative stock")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output lengths of a workload, in tokens."""

    name: str
    mean_input: float
    mean_output: float
    p95_input: float
    p95_output: float

    def __post_init__(self) -> None:
        require_positive(self.name, mean_input=self.mean_input, mean_output=self.mean_output)
        if self.p95_input < self.mean_input or self.p95_output < self.mean_output:
            raise ValueError(f"lengths {self.name}: a p95 below its mean")


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives: time to first token, time per output token."""

    ttft_ms: float
    tpot_ms: float

    def __post_init__(self) -> None:
        require_positive("SLO", ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms)


@dataclass(frozen=True, slots=True)
class Workload:
    """One stream of requests to one model under one SLO."""

    name: str
    model: ModelSpec
    dtype: str
    slo: Slo
    lengths: Lengths
    demand_rps: float
    weight: float = 1.0  # of one unserved request/s, relative to the other workloads

    def __post_init__(self) -> None:
        require_positive(self.name, weight=self.weight)
        if not (math.isfinite(self.demand_rps) and self.demand_rps >= 0):
            raise ValueError(f"{self.name}: demand_rps must be zero or more, got {self.demand_rps}")


Combination = tuple[tuple[str, int], ...]  # ((node class, count), ...) sorted by class name


def combination_of(counts: Mapping[str, int]) -> Combination:
    """The canonical form of a multiset of node classes."""
    return tuple(sorted((name, count) for name, count in counts.items() if count > 0))


def combination_size(combination: Combination) -> int:
    """Nodes in a combination."""
    return sum(count for _, count in combination)


def gpu_of(node_class: str) -> str:
    """'L4' of 'L4 x4'."""
    return node_class.rsplit(" x", 1)[0]


def gpus_of(node_class: str) -> int:
    """4 of 'L4 x4'."""
    return int(node_class.rsplit(" x", 1)[1])


def describe_combination(combination: Combination) -> str:
    """'L40S x1 + 2 L4 x1'."""
    return " + ".join(name if count == 1 else f"{count} {name}" for name, count in combination)


@dataclass(frozen=True, slots=True)
class StageNode:
    """One node of a stage and its share of every micro-batch."""

    node_class: str
    tensor_parallel_size: int
    data_parallel_size: int  # groups inside the node; times tensor_parallel_size = its GPUs
    batch: int  # requests (decode) or prompts (prefill) of a micro-batch


@dataclass(frozen=True, slots=True)
class Stage:
    """A contiguous layer range served by one or more data-parallel nodes."""

    first_layer: int
    layers: int
    nodes: tuple[StageNode, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """How one combination serves one phase of a workload."""

    stages: tuple[Stage, ...]
    micro_batches: int  # M
    micro_batch_size: int  # b
    cycle_ms: float  # decode: C of P5; prefill: the slowest stage's step at mean lengths
    latency_ms: float  # decode: C; prefill: sum of stage times and hops at p95 lengths
    raw_rps: float  # requests/s before the utilisation cap

    def describe(self) -> str:
        """'[L40S x1 | layers 0-39] -> [2x L4 x1 | 40-63]'."""
        parts = []
        for index, stage in enumerate(self.stages):
            word = "layers " if index == 0 else ""
            last = stage.first_layer + stage.layers - 1
            parts.append(f"[{_describe_nodes(stage.nodes)} | {word}{stage.first_layer}-{last}]")
        return " -> ".join(parts)


def _describe_nodes(nodes: tuple[StageNode, ...]) -> str:
    counts: dict[str, int] = {}
    for node in nodes:
        label = node.node_class
        if node.tensor_parallel_size * node.data_parallel_size > 1:
            groups = f"{node.data_parallel_size}x" if node.data_parallel_size > 1 else ""
            label += f" as {groups}TP{node.tensor_parallel_size}"
        counts[label] = counts.get(label, 0) + 1
    return " + ".join(name if n == 1 else f"{n}x {name}" for name, n in counts.items())


@dataclass(frozen=True, slots=True)
class Template:
    """The best way one combination serves one phase of a workload; a replica runs one."""

    id: str
    workload: str
    phase: Phase
    combination: Combination
    placement: Placement
    throughput_rps: float  # requests/s inside the SLO, after the utilisation cap
    provenance: Provenance  # the worst of the performance numbers used
    shared_rps: Mapping[str, float] = field(default_factory=dict)  # T[t, w] of other workloads

    def __post_init__(self) -> None:
        require_positive(self.id, throughput_rps=self.throughput_rps)

    @property
    def serves(self) -> Mapping[str, float]:
        """T[t, w] by workload: requests/s when the replica serves nothing else."""
        return {self.workload: self.throughput_rps, **self.shared_rps}

    @property
    def nodes(self) -> int:
        return combination_size(self.combination)

    @property
    def is_homogeneous(self) -> bool:
        return len(self.combination) == 1

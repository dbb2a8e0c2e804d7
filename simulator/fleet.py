"""Engines of replicas: how a placement becomes schedulers, lanes, limits and KV pools.

A replica of one stage is an engine per tensor parallel group. One of several stages, each a node
with as many groups, is as many pipelines. Everything else (several nodes in a stage of a pipeline,
unequal groups) is one engine whose requests are each pinned to one group of every stage.
Source: docs/formulation.md, section 10; planner/engine.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.engine import engine_limits
from planner.perf.model import PerformanceModel
from planner.placement.settings import PlacementSettings
from planner.types import Lengths, NodeClass, Phase, Placement, Stage, StageNode, Workload
from simulator.errors import SimulationError
from simulator.kernels.types import BLOCK_TOKENS, MOST_STAGES
from simulator.tables import GroupKind

GIB = 2.0**30
BITS = 8.0
GBIT_PER_MS = 1e6  # bits per ms at 1 Gbit/s


@dataclass(frozen=True, slots=True)
class Lane:
    """One tensor parallel group of a stage."""

    kind: GroupKind
    overhead_ms: float  # of every step
    kv_blocks: int
    weight: float  # its share of the stage's requests, relative to the other lanes


@dataclass(frozen=True, slots=True)
class EngineStage:
    """Some layers on some lanes."""

    layers: int
    has_head: bool
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class Engine:
    """One scheduler with its pipeline."""

    name: str
    phase: Phase
    domain: str
    weights: Mapping[str, float]  # planned requests/s by workload
    stages: tuple[EngineStage, ...]
    micro_batches: int  # most in flight
    step_requests: int  # most decodes in one micro-batch; prefill: prompts
    most_requests: int  # running at once
    token_budget: int  # new tokens of one micro-batch
    hop_latency_ms: float = 0.0
    hop_ms_per_token: float = 0.0
    kv_ms_per_token: float = 0.0  # to send (prefill) or receive (decode) a prompt's KV
    group: str = ""  # engines of one group are alike; its name where none is given

    def __post_init__(self) -> None:
        if not 1 <= len(self.stages) <= MOST_STAGES:
            raise SimulationError(
                f"{self.name}: a pipeline of {len(self.stages)} stages; the simulator knows "
                f"1 to {MOST_STAGES}"
            )
        if min(self.micro_batches, self.step_requests, self.most_requests, self.token_budget) < 1:
            raise SimulationError(f"{self.name}: every limit of an engine is at least 1")


@dataclass(frozen=True, slots=True)
class Site:
    """What engines of a scenario have in common."""

    performance: PerformanceModel
    nodes: Mapping[str, NodeClass]  # by name
    settings: PlacementSettings


def replica_engines(
    name: str,
    phase: Phase,
    placement: Placement,
    workload: Workload,
    domain: str,
    weights: Mapping[str, float],
    site: Site,
) -> list[Engine]:
    """The engines of one replica; `weights` are the replica's, split by the engines' shares."""
    pieces = _pieces(placement)
    total = sum(share for _, share in pieces)
    return [
        _engine(
            name if len(pieces) == 1 else f"{name}/{number}",
            phase,
            placement,
            stages,
            share,
            workload,
            domain,
            {key: weight * share / total for key, weight in weights.items()},
            site,
        )
        for number, (stages, share) in enumerate(pieces)
    ]


Part = tuple[Stage, tuple[StageNode, ...]]  # a stage and one entry per lane
Piece = tuple[tuple[Part, ...], int]  # the parts of an engine, its share of b


def _pieces(placement: Placement) -> list[Piece]:
    stages = placement.stages
    if len(stages) == 1:
        return [
            (((stages[0], (node,)),), math.ceil(node.batch / node.data_parallel_size))
            for node in stages[0].nodes
            if node.batch > 0
            for _ in range(node.data_parallel_size)
        ]
    groups = {node.data_parallel_size for stage in stages for node in stage.nodes}
    if len(groups) == 1 and all(len(stage.nodes) == 1 for stage in stages):
        (count,) = groups
        parts = tuple((stage, stage.nodes) for stage in stages)
        return [(parts, math.ceil(placement.micro_batch_size / count))] * count
    parts = tuple(
        (
            stage,
            tuple(n for n in stage.nodes if n.batch > 0 for _ in range(n.data_parallel_size)),
        )
        for stage in stages
    )
    return [(parts, placement.micro_batch_size)]


def _engine(
    name: str,
    phase: Phase,
    placement: Placement,
    parts: tuple[Part, ...],
    share: int,
    workload: Workload,
    domain: str,
    weights: Mapping[str, float],
    site: Site,
) -> Engine:
    model, settings = workload.model, site.settings
    last = len(parts) - 1
    stages = tuple(
        EngineStage(
            layers=stage.layers,
            has_head=index == last,
            lanes=tuple(
                _lane(node, workload, stage.layers, index == 0, index == last, site)
                for node in nodes
            ),
        )
        for index, (stage, nodes) in enumerate(parts)
    )
    in_flight = placement.micro_batches
    requests, tokens = share_limits(phase, share, in_flight, workload.lengths)
    slowest = min(
        site.nodes[node.node_class].network_peak_gbit_per_s
        for stage in placement.stages
        for node in stage.nodes
    )
    kv_bytes = 0.0
    if phase is not Phase.AGGREGATED:
        kv_bytes = max(
            stage.layers
            * model.kv_bytes_per_token_per_layer
            / min(site.nodes[node.node_class].network_peak_gbit_per_s for node in nodes)
            for stage, nodes in parts
        )
    return Engine(
        name=name,
        phase=phase,
        domain=domain,
        weights=weights,
        stages=stages,
        micro_batches=in_flight,
        step_requests=math.ceil(requests / in_flight),
        most_requests=requests,
        token_budget=tokens,
        hop_latency_ms=settings.hop_latency_ms,
        hop_ms_per_token=model.hop_bytes_per_token
        * (settings.hop_ms_per_byte + BITS / (slowest * GBIT_PER_MS)),
        kv_ms_per_token=kv_bytes * BITS / GBIT_PER_MS,
    )


def share_limits(phase: Phase, share: int, micro_batches: int, lengths: Lengths) -> tuple[int, int]:
    """Running requests and new tokens per step of an engine with `share` of b.

    As the plan's engine limits (planner/engine.py), for a single group of that share.
    """
    node = StageNode("", 1, 1, share)
    single = Placement((Stage(0, 1, (node,)),), micro_batches, share, 1.0, 1.0, 1.0)
    limits = engine_limits(phase, single, lengths)
    return limits.max_num_seqs, limits.max_num_batched_tokens


def _lane(
    node: StageNode, workload: Workload, layers: int, first: bool, last: bool, site: Site
) -> Lane:
    node_class, model = site.nodes[node.node_class], workload.model
    tp = node.tensor_parallel_size
    gpu, settings = node_class.gpu, site.settings
    weights = layers * model.bytes_per_layer + first * model.embed_bytes
    weights += last * model.lm_head_bytes
    room = GIB * (gpu.memory_gib * settings.memory_utilization - settings.reserve_gib_per_gpu)
    per_token = layers * model.kv_bytes_per_token_per_layer / model.kv_shards(tp)
    blocks = math.floor((room - weights / tp) / per_token / BLOCK_TOKENS)
    if blocks < 1:
        raise SimulationError(
            f"{layers} layers of {model.name} leave no room for KV on {node_class.name} as TP{tp}"
        )
    return Lane(
        kind=GroupKind(model, workload.dtype, node_class, tp),
        overhead_ms=site.performance.overhead_ms(gpu, model.name),
        kv_blocks=blocks,
        weight=node.batch / node.data_parallel_size,
    )


def groups_of(engines: Sequence[Engine]) -> list[GroupKind]:
    """The kinds of groups in a fleet, each once, in the order in which they appear."""
    found = {lane.kind.key: lane.kind for e in engines for s in e.stages for lane in s.lanes}
    return list(found.values())

"""Small synthetic values for tests."""

from __future__ import annotations

import math

import numpy as np

from planner.allocation.problem import AllocationSettings
from planner.placement.profile import NodeOption, NodeProfile, PhaseProblem, RequestTerms
from planner.types import (
    Combination,
    GpuSpec,
    Lengths,
    Link,
    Market,
    ModelSpec,
    NodeClass,
    Offer,
    Phase,
    Placement,
    Provenance,
    Slo,
    Stage,
    StageNode,
    Template,
    Workload,
    combination_of,
)

EXACT = AllocationSettings(relative_gap=1e-9, deadline_s=30.0)
MODEL = ModelSpec(
    name="test/model-1B",
    dtype="bf16",
    layers=4,
    hidden=1024,
    heads=8,
    kv_heads=4,
    head_dim=128,
    intermediate=4096,
    experts=0,
    experts_per_token=0,
    moe_intermediate=0,
    vocab=32000,
    weight_bytes=2.0,
    expert_weight_bytes=0.0,
    bytes_per_layer=40_000_000,
    embed_bytes=65_000_000,
    lm_head_bytes=65_000_000,
    kv_bytes_per_token_per_layer=2048,
    hop_bytes_per_token=4096,
)
LENGTHS = Lengths("test", mean_input=500, mean_output=100, p95_input=1000, p95_output=200)


def gpu(name: str = "L4", memory_gib: float = 24.0) -> GpuSpec:
    return GpuSpec(name, f"{name}-profile", memory_gib, 300.0, 121.0, 72.0, 8.9)


def node_class(name: str, count: int = 1, link: Link = Link.NONE) -> NodeClass:
    return NodeClass(f"{name} x{count}", gpu(name), count, link, 10.0, 10.0)


def workload(name: str = "chat", demand_rps: float = 1.0, weight: float = 1.0) -> Workload:
    return Workload(name, MODEL, "bf16", Slo(1000.0, 50.0), LENGTHS, demand_rps, weight)


def template(
    name: str, phase: Phase, counts: dict[str, int], rps: float, workload_name: str = "chat"
) -> Template:
    """A template whose placement is one stage of all its nodes."""
    combination: Combination = combination_of(counts)
    nodes = tuple(StageNode(c, 1, 1, 1) for c, n in combination for _ in range(n))
    placement = Placement((Stage(0, 4, nodes),), 1, len(nodes), 10.0, 10.0, rps)
    return Template(name, workload_name, phase, combination, placement, rps, Provenance.MEASURED)


def offer(
    domain: str, node: str, price: float, stock: int, market: Market = Market.ON_DEMAND
) -> Offer:
    return Offer(domain, f"type-{node}", node, market, price, stock, "assumed in a test")


def random_problem(
    seed: int,
    phase: Phase,
    layers: int = 5,
    classes: int = 3,
    batches: tuple[int, ...] = (1, 2, 3, 4),
    gpu_counts: tuple[int, ...] = (1, 2),
) -> PhaseProblem:
    """A phase problem with random step times, memories and networks."""
    rng = np.random.default_rng(seed)
    nodes = {}
    for index in range(classes):
        gpus = int(rng.choice(gpu_counts))
        options = []
        for tp in [tp for tp in (1, 2, 4, 8) if tp <= gpus]:
            layer = np.sort(rng.uniform(1.0, 6.0, size=max(batches))) / tp**0.7
            options.append(
                NodeOption(
                    tp=tp,
                    dp=gpus // tp,
                    layer_ms=layer,
                    head_ms=np.sort(rng.uniform(0.5, 2.0, size=max(batches))),
                    latency_layer_ms=layer if phase.in_cycles else layer * rng.uniform(1.1, 1.5),
                    overhead_ms=float(rng.uniform(0.0, 0.5)),
                    free_bytes=float(rng.uniform(60.0, 260.0)),
                    layer_bytes=20.0 / tp,
                    embed_bytes=15.0 / tp,
                    lm_head_bytes=15.0 / tp,
                    kv_bytes=1.0 / tp,
                    provenance=Provenance.MEASURED,
                )
            )
        name = f"N{index} x{gpus}"
        nodes[name] = NodeProfile(
            name, 1.0, float(rng.uniform(0.5, 2.0)), float(rng.uniform(0.05, 0.2)), tuple(options)
        )
    decode = phase.in_cycles
    mixed = phase is Phase.AGGREGATED
    terms = RequestTerms(
        phase=phase,
        layers=layers,
        budget_ms=float(rng.uniform(18.0, 60.0)),
        handover_ms=math.inf if mixed else float(rng.uniform(0.05, 0.4)),
        tokens_per_cycle=7.0 if decode else 1.0,
        kv_tokens=3.0,
        kv_tokens_extra=2.0,
        prompt_kv_bytes_per_layer=0.0 if mixed else 2000.0,
        p95_prompt_kv_bytes_per_layer=0.0 if mixed else 5000.0,
        hop_tokens=1.0 if decode else 3.0,
        hop_tokens_extra=0.0 if decode else 2.0,
        hop_bytes_per_token=20000.0,
        hop_latency_ms=0.2,
        hop_ms_per_byte=float(rng.choice([0.0, 5e-6])),
        model_bytes=layers * 20.0 + 30.0,
        utilization=0.9,
        chunk_tokens=2.0 if mixed else 0.0,
        p95_input=9.0,
        chunks_budget_ms=float(rng.uniform(60.0, 160.0)) if mixed else math.inf,
    )
    return PhaseProblem("random", terms, batches, nodes)

"""Which templates an inference engine can run, and why not the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.types import Lengths, Phase, Placement, Stage, Template


class Engine(StrEnum):
    """Who runs the replicas."""

    ANY = "any"  # one that can run every placement
    VLLM = "vllm"  # as released (0.32): pipelines of one node per stage and of one width
    CORAL = "coral"  # vLLM with Coral's pipelines (executor/vllm_pipeline)


SEVERAL_NODES = "a stage of several nodes"
UNEQUAL_WIDTHS = "stages of unequal tensor parallel sizes"
UNEQUAL_GROUPS = "stages of unequal numbers of groups"
KV_OF_STAGES = "prefill or decode in stages"


def why_not(template: Template, engine: Engine) -> str | None:
    """The first reason, of the four above, why the engine can't run a template; None: it can."""
    return why_not_stages(template.phase, template.placement.stages, engine)


def runnable(templates: Iterable[Template], engine: Engine) -> tuple[Template, ...]:
    """The templates that the engine can run, in their order."""
    return tuple(t for t in templates if why_not(t, engine) is None)


def why_not_stages(phase: Phase, stages: Sequence[Stage], engine: Engine) -> str | None:
    """The same of a template's phase and stages; Coral's pipelines run all of them.

    A world of vLLM is (pipeline stages) x (one tensor parallel size), one node per stage position;
    the layers may be split unevenly. Equal groups inside the nodes are as many engines, each on one
    group of every node. KV moves between prefill and decode of one stage each: vLLM's NIXL
    connector refuses another number of layers per worker, and a plan pairs replicas freely.

    Source: vLLM 0.32, tried; docs/formulation.md, section 3.
    """
    if engine is not Engine.VLLM:
        return None
    if any(len(stage.nodes) > 1 for stage in stages):
        return SEVERAL_NODES
    if len({_tensor_parallel_size(stage) for stage in stages}) > 1:
        return UNEQUAL_WIDTHS
    if len({stage.nodes[0].data_parallel_size for stage in stages}) > 1:
        return UNEQUAL_GROUPS
    if len(stages) > 1 and phase is not Phase.AGGREGATED:
        return KV_OF_STAGES
    return None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine of a replica takes at once, so that its steps are those of the plan."""

    max_num_seqs: int  # requests in flight
    max_num_batched_tokens: int  # new tokens of one step


SPARE_PLACES = 1.25  # of b: with fewer, long prompts leave steps half empty behind them


def engines_side_by_side(placement: Placement) -> int:
    """Engines of a replica that share b: one on each group where every stage is one node of equally
    many, as stock vLLM needs it; else one over all of them.
    """
    counts = {node.data_parallel_size for stage in placement.stages for node in stage.nodes}
    single = all(len(stage.nodes) == 1 for stage in placement.stages)
    return counts.pop() if single and len(counts) == 1 else 1


def engine_limits(phase: Phase, placement: Placement, lengths: Lengths) -> EngineLimits:
    """Of each of the replica's engines: M micro-batches of its share of b.

    A step carries that share's decodes; aggregated, b p / o new tokens more; prefill, its prompts
    whole, one of them of p95 length. Aggregated, the tokens hold the decodes to b on average;
    requests whose prompts are under way (b / o whole ones a step, and a begun one) have places of
    their own, since among the b they would keep decodes out, and so have some decodes more, since
    outputs are unequal. vLLM asks for at least as many tokens as requests.
    Source: docs/formulation.md, sections 1 and 3.
    """
    batch = math.ceil(placement.micro_batch_size / engines_side_by_side(placement))
    places = batch
    match phase:
        case Phase.AGGREGATED:
            tokens = batch * (1.0 + lengths.mean_input / lengths.mean_output)
            places = math.ceil(SPARE_PLACES * batch) + math.ceil(batch / lengths.mean_output) + 1
        case Phase.DECODE:
            tokens = float(batch)
        case Phase.PREFILL:
            tokens = (batch - 1) * lengths.mean_input + lengths.p95_input
    requests = placement.micro_batches * places
    return EngineLimits(requests, max(math.ceil(tokens), requests))


def _tensor_parallel_size(stage: Stage) -> int:
    return stage.nodes[0].tensor_parallel_size

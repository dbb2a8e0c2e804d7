"""Which templates an inference engine can run, and why not the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from planner.types import Phase, Stage, Template


class Engine(StrEnum):
    """Who runs the replicas."""

    ANY = "any"  # one that can run every placement
    VLLM = "vllm"  # as released (0.32): pipelines of one node per stage and of one width


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
    """The same of a template's phase and stages.

    A world of vLLM is (pipeline stages) x (one tensor parallel size), one node per stage position;
    the layers may be split unevenly. Equal groups inside the nodes are as many engines, each on one
    group of every node. KV moves between prefill and decode of one stage each: vLLM's NIXL
    connector refuses another number of layers per worker, and a plan pairs replicas freely.

    Source: vLLM 0.32, tried; docs/formulation.md, section 3.
    """
    if engine is Engine.ANY:
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


def _tensor_parallel_size(stage: Stage) -> int:
    return stage.nodes[0].tensor_parallel_size

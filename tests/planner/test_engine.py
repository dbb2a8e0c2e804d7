"""What stock vLLM runs, reason by reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.engine import (
    KV_OF_STAGES,
    SEVERAL_NODES,
    UNEQUAL_GROUPS,
    UNEQUAL_WIDTHS,
    Engine,
    runnable,
    why_not,
)
from planner.types import Phase, Stage, StageNode, Template
from tests.builders import template

PRE, DEC, AGG = Phase.PREFILL, Phase.DECODE, Phase.AGGREGATED


def staged(phase: Phase, *stages: tuple[tuple[int, int], ...]) -> Template:
    """A template of stages of nodes of (tensor parallel size, groups)."""
    found, first = [], 0
    for number, nodes in enumerate(stages):
        layers = 1 + number  # uneven
        found.append(Stage(first, layers, tuple(StageNode("A x8", tp, dp, 1) for tp, dp in nodes)))
        first += layers
    plain = template("t", phase, {"A x8": sum(len(nodes) for nodes in stages)}, 1.0)
    return replace(plain, placement=replace(plain.placement, stages=tuple(found)))


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (staged(AGG, ((8, 1),)), None),
        (staged(PRE, ((2, 4),)), None),  # four engines on one node
        (staged(DEC, ((8, 1),)), None),
        (staged(AGG, ((4, 1),), ((4, 1),), ((4, 1),)), None),  # uneven layers
        (staged(AGG, ((4, 2),), ((4, 2),)), None),  # two pipelines side by side
        (staged(AGG, ((4, 1), (4, 1))), SEVERAL_NODES),
        (staged(AGG, ((4, 1),), ((4, 1), (4, 1))), SEVERAL_NODES),
        (staged(AGG, ((4, 1),), ((8, 1),)), UNEQUAL_WIDTHS),
        (staged(AGG, ((4, 1),), ((4, 2),)), UNEQUAL_GROUPS),
        (staged(PRE, ((4, 1),), ((4, 1),)), KV_OF_STAGES),
        (staged(DEC, ((4, 1),), ((4, 1),)), KV_OF_STAGES),
    ],
)
def test_stock_vllm_runs_it_or_says_why_not(made: Template, reason: str | None) -> None:
    assert why_not(made, Engine.VLLM) == reason
    assert why_not(made, Engine.ANY) is None
    assert why_not(made, Engine.CORAL) is None
    assert runnable([made], Engine.VLLM) == (() if reason else (made,))

"""A scenario's engine leaves out what it can't run, and says so where nothing is left."""

from __future__ import annotations

import pytest

from catalog.store import Catalog
from planner.engine import Engine
from planner.errors import NoTemplateError
from planner.types import Phase
from tasks.allocation import allocation_input
from tasks.inputs import load_inputs
from tasks.scenario_file import read_scenario
from tests.builders import template


def test_a_plan_keeps_to_what_the_engine_runs(seeded: Catalog) -> None:
    spec = read_scenario("tiny")
    assert spec.engine is Engine.ANY
    vllm = load_inputs(seeded, spec.model_copy(update={"engine": Engine.VLLM}))
    alone = template("one", Phase.AGGREGATED, {"L4 x1": 1}, 1.0, "Qwen3-14B")
    several = template("two", Phase.AGGREGATED, {"L4 x1": 2}, 3.0, "Qwen3-14B")
    everything = allocation_input(load_inputs(seeded, spec), [alone, several])
    assert {t.id for t in everything.templates} == {"one", "two"}
    assert allocation_input(vllm, [alone, several]).templates == (alone,)
    with pytest.raises(NoTemplateError, match="engine 'vllm' cannot run 1 of the 1 templates"):
        allocation_input(vllm, [several])
    with pytest.raises(NoTemplateError, match="no prefill template") as error:
        allocation_input(vllm, [])
    assert "engine" not in str(error.value)

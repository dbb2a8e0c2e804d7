"""The scenario `internet`: made by its generator, resolved whole, planned in a small cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from catalog.store import Catalog
from examples.internet import MODELS, internet_yaml
from planner.allocation.solve import plan_allocation
from planner.known import Known
from planner.resolve import resolve_scenario
from planner.types import Market
from tasks.allocation import allocation_input, read_library
from tasks.inputs import load_inputs
from tasks.library import build_phase
from tasks.scenario_file import example_folder, read_scenario
from tasks.solving import Solvers


def test_the_shipped_file_is_what_the_generator_writes(known: Known) -> None:
    shipped = (example_folder() / "internet.yaml").read_bytes()
    assert shipped == internet_yaml(known).encode(), "run `python -m examples.internet`"


def test_it_has_the_size_that_it_says(known: Known) -> None:
    scenario = resolve_scenario(read_scenario("internet"), known)
    assert len(scenario.workloads) == len(set(MODELS)) == 46
    assert len(scenario.node_classes) == 40
    assert len({offer.domain for offer in scenario.offers}) == 30
    assert {offer.market for offer in scenario.offers} == {Market.ON_DEMAND, Market.SPOT}
    assert {offer.node_class for offer in scenario.offers} == {
        node.name for node in scenario.node_classes
    }
    assert scenario.placement.max_nodes == 2
    demand = [workload.demand_rps for workload in scenario.workloads]
    assert demand == sorted(demand, reverse=True)
    assert demand[0] == pytest.approx(46 * demand[-1], rel=1e-3)  # Zipf


def test_prompts_and_answers_fit_the_models() -> None:
    """Models of 4,096 tokens or less are too short for the traces' p95."""
    short = {"meta-llama/Llama-2-70b-hf", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"}
    assert not short & set(MODELS)


@pytest.mark.slow
def test_a_small_cut_is_planned(tmp_path: Path) -> None:
    whole = read_scenario("internet")
    names = {"google/gemma-3-1b-it", "mistralai/Mixtral-8x7B-Instruct-v0.1"}
    spec = whole.model_copy(
        update={
            "workloads": tuple(w for w in whole.workloads if w.model in names),
            "node_classes": ("T4 x1", "L4 x1", "A100-80GB-PCIe x2", "RTX PRO Server 6000 x2"),
            "domains": ("aws:us-east-1", "azure:eastus", "gcp:us-central1"),
            "demand_scale": 0.02,
            "allocation": whole.allocation.model_copy(update={"deadline_s": 5.0}),
        }
    )
    catalog = Catalog(tmp_path)
    inputs = load_inputs(catalog, spec)
    with Solvers(workers=0) as solvers:
        for phase in inputs.phases:
            build_phase(catalog, phase, solvers)
    plan = plan_allocation(allocation_input(inputs, read_library(catalog, inputs)))
    assert plan.served_share == pytest.approx(1.0)
    assert plan.gap < 0.1

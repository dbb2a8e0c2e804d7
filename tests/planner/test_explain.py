"""Why a plan is as it is: entry prices against solving again, costs by workload."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.allocation.assemble import shortfall_tolerance
from planner.allocation.columns import limited
from planner.allocation.explain import cost_by_workload, entry_prices, without_gpu
from planner.allocation.model import AllocationModel
from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, NodeKey, node_key
from planner.allocation.solve import plan_allocation
from planner.errors import UnknownNameError
from planner.programs import solve_program
from planner.types import Phase, gpu_of
from tests.builders import EXACT, offer, template, workload
from tests.planner.test_columns import random_input


def rented_in_relaxation(data: AllocationInput, key: NodeKey, price: float, short: float) -> float:
    """Nodes of an offer in the whole relaxation, solved at another price of it."""
    offers = tuple(
        replace(o, price_usd_per_hour=price) if node_key(o) == key else o for o in data.offers
    )
    model = AllocationModel(replace(data, offers=offers))
    program = limited(
        model.fulfilling(model.program.cost), model, short + shortfall_tolerance(data)
    )
    answer = solve_program(program, relax=True)
    number = [node_key(o) for o in data.offers].index(key)
    return float(answer.values[model.parts.nodes[number]])


def unused_gpus(data: AllocationInput, plan: Plan) -> set[str]:
    used = {gpu_of(nodes.offer.node_class) for nodes in plan.nodes}
    return {gpu_of(offer.node_class) for offer in data.offers} - used


@pytest.mark.parametrize("seed", range(24))
def test_an_offer_enters_the_relaxation_just_below_its_entry_price(seed: int) -> None:
    data = replace(random_input(seed), held={}, running=())
    plan = plan_allocation(data)
    found = entry_prices(data, plan)
    assert {gpu_of(entry.offer.node_class) for entry in found} == unused_gpus(data, plan)
    assert [entry.share for entry in found] == sorted((e.share for e in found), reverse=True)
    for entry in found:
        key, price, short = node_key(entry.offer), entry.usd_per_hour, plan.weighted_shortfall
        if price > 1e-3:
            assert rented_in_relaxation(data, key, 0.999 * price, short) > 1e-6, (key, price)
        if entry.share < 0.999:
            assert rented_in_relaxation(data, key, price * 1.001 + 1e-3, short) < 1e-6, (key, price)


@pytest.mark.parametrize("seed", [2, 6, 10, 14])
def test_no_offer_of_the_same_gpu_would_enter_before_it(seed: int) -> None:
    data = replace(random_input(seed), held={}, running=())
    plan = plan_allocation(data)
    for entry in entry_prices(data, plan):
        for other in data.offers:
            dearer = (entry.share + 0.01) * other.price_usd_per_hour
            if other.node_class == entry.offer.node_class and entry.share < 0.98:
                assert (
                    rented_in_relaxation(data, node_key(other), dearer, plan.weighted_shortfall)
                    < 1e-6
                )


def shared_replicas() -> AllocationInput:
    both = replace(template("t", Phase.AGGREGATED, {"A x1": 1}, 4.0), shared_rps={"code": 2.0})
    return AllocationInput.of(
        [workload("chat", 2.0), workload("code", 1.0)],
        [both],
        [offer("d1", "A x1", 3.0, 5)],
        settings=EXACT,
    )


def test_a_shared_replica_costs_each_workload_its_busy_time() -> None:
    data = shared_replicas()
    plan = plan_allocation(data)
    assert plan.cost_usd_per_hour == pytest.approx(3.0)
    assert cost_by_workload(plan) == pytest.approx({"chat": 1.5, "code": 1.5})


@pytest.mark.parametrize("seed", range(6))
def test_costs_by_workload_add_up_to_the_rent(seed: int) -> None:
    data = replace(random_input(seed), held={}, running=())
    plan = plan_allocation(data)
    assert sum(cost_by_workload(plan).values()) <= plan.cost_usd_per_hour + 1e-6
    if data.options.largest_spot_share == 1.0:  # else nodes that no replica uses make room
        assert sum(cost_by_workload(plan).values()) == pytest.approx(plan.cost_usd_per_hour)


def test_without_a_gpu_nobody_rents_it_and_an_unknown_one_is_named() -> None:
    data = random_input(3)
    plan = plan_allocation(without_gpu(data, "N0"))
    assert plan.nodes
    assert all(gpu_of(nodes.offer.node_class) != "N0" for nodes in plan.nodes)
    assert plan.weighted_shortfall >= plan_allocation(data).weighted_shortfall - 1e-9
    with pytest.raises(UnknownNameError, match="unknown GPU 'N7'"):
        without_gpu(data, "N7")


def test_one_more_node_is_worth_what_solving_with_it_saves() -> None:
    """A 1 USD/hour class that is sold out beside one of 3; every class is named."""
    chat = workload("chat", 4.0)
    cheap = template("cheap", Phase.AGGREGATED, {"A x1": 1}, 1.0)
    dear = template("dear", Phase.AGGREGATED, {"B x1": 1}, 1.0)
    offers = [offer("d1", "A x1", 1.0, 2), offer("d1", "B x1", 3.0, 9)]
    data = AllocationInput.of([chat], [cheap, dear], offers, settings=EXACT)
    worth = {c.node_class: (c.worth, c.worth_unit) for c in plan_allocation(data).worth.classes}
    startup = 1.0 + data.settings.startup_minutes / 60.0
    assert worth == {
        "A x1": (pytest.approx(2.0 * startup), "USD/hour"),
        "B x1": (0.0, "USD/hour"),
    }

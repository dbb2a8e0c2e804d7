"""Allocation against enumeration, every constraint binding once, scarcity, Homo-joint."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.allocation.check import PlanCheckError, check_plan
from planner.allocation.problem import AllocationInput, AllocationSettings, build_allocation
from planner.allocation.solve import plan_allocation
from planner.baselines.homo_joint import better_of, plan_homo_joint
from planner.errors import MarketError, NoTemplateError
from planner.types import Market, Phase
from tests.builders import offer, template, workload

EXACT = AllocationSettings(relative_gap=1e-9, deadline_s=30.0)
PRE, DEC = Phase.PREFILL, Phase.DECODE


def enumerate_best(data: AllocationInput) -> tuple[float, float]:
    """(weighted shortfall, cost over the horizon) of the best plan, by trying every count."""
    places = [
        (t, d)
        for t in data.templates
        for d in sorted({o.domain for o in data.offers})
        if all(
            any(o.domain == d and o.node_class == n for o in data.offers) for n, _ in t.combination
        )
    ]
    stock = {}
    for o in data.offers:
        stock[o.domain, o.node_class] = o.stock
    limits = [min(stock[d, name] // count for name, count in t.combination) for t, d in places]
    best = (math.inf, math.inf)
    for counts in itertools.product(*(range(limit + 1) for limit in limits)):
        needed: dict[tuple[str, str], int] = {}
        capacity: dict[tuple[str, str, Phase], float] = {}
        for (t, d), count in zip(places, counts, strict=True):
            for name, per_replica in t.combination:
                needed[d, name] = needed.get((d, name), 0) + per_replica * count
            key = (t.workload, d, t.phase)
            capacity[key] = capacity.get(key, 0.0) + t.throughput_rps * count
        if any(count > stock[place] for place, count in needed.items()):
            continue
        short = 0.0
        for w in data.workloads:
            served = sum(
                min(capacity.get((w.name, d, p), 0.0) for p in Phase)
                for d in {o.domain for o in data.offers}
            )
            short += w.weight * max(0.0, w.demand_rps - served)
        best = min(best, (round(short, 9), _rent(data, needed)))
    return best


def _rent(data: AllocationInput, needed) -> float:
    """Cheapest way to rent the nodes: held ones cost no start-up, markets share the stock."""
    total = 0.0
    startup = data.settings.startup_minutes / 60.0
    for (domain, name), count in needed.items():
        units = []
        for o in data.offers:
            if (o.domain, o.node_class) != (domain, name):
                continue
            held = data.held.get((o.domain, o.instance_type, o.market), 0)
            hourly = o.price_usd_per_hour * data.settings.horizon_hours
            units += [hourly] * held
            units += [hourly + startup * o.price_usd_per_hour] * (o.stock - min(held, o.stock))
        total += sum(sorted(units)[:count])
    return total


@st.composite
def small_cases(draw) -> AllocationInput:
    number = st.floats(0.5, 4.0).map(lambda v: round(v, 2))
    names = ["A x1", "B x1"]
    templates = []
    for w in ("chat", "code"):
        for phase in Phase:
            for index in range(draw(st.integers(1, 2))):
                counts = draw(
                    st.sampled_from([{names[0]: 1}, {names[1]: 1}, dict.fromkeys(names, 1)])
                )
                templates.append(template(f"{w}-{phase}-{index}", phase, counts, draw(number), w))
    offers = []
    for domain, name in itertools.product(("d1", "d2"), names):
        stock = draw(st.integers(0, 2))
        price = draw(number)
        offers.append(offer(domain, name, price, stock))
        if draw(st.booleans()):
            spot = replace(offers[-1], market=Market.SPOT, price_usd_per_hour=round(price / 2, 3))
            offers.append(spot)
    workloads = [
        workload("chat", draw(st.floats(0.0, 5.0)), draw(number)),
        workload("code", draw(st.floats(0.0, 5.0))),
    ]
    held = {}
    if draw(st.booleans()) and offers[0].stock:
        held[offers[0].domain, offers[0].instance_type, offers[0].market] = 1
    return AllocationInput.of(workloads, templates, offers, held, EXACT)


@settings(max_examples=60, deadline=None)
@given(small_cases())
def test_allocation_matches_enumeration(data: AllocationInput) -> None:
    plan = plan_allocation(data)
    short, cost = enumerate_best(data)
    assert plan.weighted_shortfall == pytest.approx(short, abs=1e-4)
    assert plan.objective_usd == pytest.approx(cost, abs=1e-3)
    assert plan.proven


@settings(max_examples=40, deadline=None)
@given(small_cases())
def test_never_worse_than_homo_joint_on_random_markets(data: AllocationInput) -> None:
    homo = plan_homo_joint(data)
    coral = better_of(plan_allocation(data, start=homo), homo)
    assert coral.weighted_shortfall <= homo.weighted_shortfall + 1e-4
    if coral.weighted_shortfall >= homo.weighted_shortfall - 1e-4:
        assert coral.objective_usd <= homo.objective_usd + 1e-6
    assert all(planned.template.is_homogeneous for planned in homo.replicas)


def simple(**changes) -> AllocationInput:
    """One workload served by an A for prefill and a B for decode."""
    values = {
        "workloads": [workload("chat", 2.0)],
        "templates": [template("p", PRE, {"A x1": 1}, 2.0), template("d", DEC, {"B x1": 1}, 1.0)],
        "offers": [offer("d1", "A x1", 3.0, 5), offer("d1", "B x1", 1.0, 5)],
    }
    values.update(changes)
    return AllocationInput.of(settings=EXACT, **values)


def test_the_plan_rents_what_its_replicas_need() -> None:
    plan = plan_allocation(simple())
    assert {n.offer.node_class: n.count for n in plan.nodes} == {"A x1": 1, "B x1": 2}
    assert plan.cost_usd_per_hour == pytest.approx(5.0)
    assert plan.objective_usd == pytest.approx(5.0 * (1 + 10 / 60))  # ten minutes of start-up
    assert plan.served_share == 1.0
    assert sum(r.load_rps for r in plan.replicas if r.template.phase is DEC) == pytest.approx(2.0)


def test_prefill_and_decode_must_be_in_one_domain() -> None:
    apart = [offer("d1", "A x1", 3.0, 5), offer("d2", "B x1", 1.0, 5)]
    plan = plan_allocation(simple(offers=apart))
    assert plan.served_share == 0.0
    assert plan.cost_usd_per_hour == 0.0


def test_spot_and_on_demand_share_one_stock() -> None:
    spot = replace(offer("d1", "B x1", 0.4, 2), market=Market.SPOT)
    offers = [offer("d1", "A x1", 3.0, 5), offer("d1", "B x1", 1.0, 2), spot]
    plan = plan_allocation(simple(offers=offers, workloads=[workload("chat", 4.0)]))
    assert sum(n.count for n in plan.nodes if n.offer.node_class == "B x1") == 2
    assert {n.offer.market for n in plan.nodes if n.offer.node_class == "B x1"} == {Market.SPOT}
    assert plan.services[0].served_rps == pytest.approx(2.0)


def test_held_nodes_cost_no_start_up() -> None:
    offers = [
        offer("d1", "A x1", 3.0, 5),
        offer("d1", "B x1", 1.0, 5),
        offer("d2", "A x1", 3.0, 5),
        offer("d2", "B x1", 1.0, 5),
    ]
    held = {("d2", "type-A x1", Market.ON_DEMAND): 1, ("d2", "type-B x1", Market.ON_DEMAND): 2}
    plan = plan_allocation(simple(offers=offers, held=held))
    assert {n.offer.domain for n in plan.nodes} == {"d2"}
    assert all(n.new == 0 for n in plan.nodes)
    assert plan.objective_usd == pytest.approx(plan.cost_usd_per_hour)


def test_scarcity_serves_the_heavier_workload_first_and_says_what_binds() -> None:
    templates = [
        template(f"{w}-{p}", p, {"A x1": 1}, 1.0, w) for w in ("chat", "code") for p in Phase
    ]
    data = AllocationInput.of(
        [workload("chat", 1.0, weight=1.0), workload("code", 1.0, weight=3.0)],
        templates,
        [offer("d1", "A x1", 2.0, 3)],
        settings=EXACT,
    )
    plan = plan_allocation(data)
    assert {s.workload: s.served_rps for s in plan.services} == {"chat": 0.0, "code": 1.0}
    assert plan.cost_usd_per_hour == pytest.approx(4.0)  # the third A would serve nobody
    tight = plan_allocation(replace(data, offers=(offer("d1", "A x1", 2.0, 2),)))
    assert [(b.offer.node_class, b.used) for b in tight.binding] == [("A x1", 2)]


def test_one_more_node_is_worth_what_it_would_save() -> None:
    templates = [
        template("p", PRE, {"A x1": 1}, 1.0),
        template("d-cheap", DEC, {"B x1": 1}, 1.0),
        template("d-dear", DEC, {"C x1": 1}, 1.0),
    ]
    offers = [
        offer("d1", "A x1", 1.0, 9),
        offer("d1", "B x1", 1.0, 1),
        offer("d1", "C x1", 5.0, 9),
    ]
    plan = plan_allocation(
        simple(templates=templates, offers=offers, workloads=[workload("chat", 3.0)])
    )
    worth = {b.offer.node_class: b.worth_usd_per_hour for b in plan.binding}
    assert worth == {"B x1": pytest.approx(4.0 * (1 + 10 / 60))}


def test_a_start_plan_is_never_lost() -> None:
    data = simple()
    first = plan_allocation(data)
    again = plan_allocation(data, start=first)
    assert again.objective_usd == pytest.approx(first.objective_usd)


def test_no_demand_needs_no_nodes() -> None:
    plan = plan_allocation(simple(workloads=[workload("chat", 0.0)], templates=[]))
    assert plan.nodes == () and plan.served_share == 1.0


def test_constraints_are_named_after_the_formulation() -> None:
    names = set(build_allocation(simple()).problem.constraints)
    for label in ("A1_", "A2_", "A3_", "A4_", "A5_prefill_", "A5_decode_", "A6_"):
        assert any(name.startswith(label) for name in names), label


def test_bad_prices_and_missing_templates_are_named() -> None:
    twice = [offer("d1", "A x1", 3.0, 5), offer("d1", "A x1", 4.0, 5)]
    with pytest.raises(MarketError, match="d1 type-A x1 on_demand is there twice"):
        simple(offers=twice)
    for price in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="price_usd_per_hour must be positive"):
            offer("d1", "A x1", price, 1)
    with pytest.raises(NoTemplateError, match="'chat' has demand but the library has no decode"):
        simple(templates=[template("p", PRE, {"A x1": 1}, 2.0)])


def test_the_recheck_refuses_a_broken_plan() -> None:
    data = simple()
    plan = plan_allocation(data)
    with pytest.raises(PlanCheckError, match="A1"):
        check_plan(data, replace(plan, nodes=plan.nodes[1:]))
    with pytest.raises(PlanCheckError, match="A2"):
        less = replace(data, offers=tuple(replace(o, stock=1) for o in data.offers))
        check_plan(less, plan)
    with pytest.raises(PlanCheckError, match="A4"):
        loaded = tuple(replace(r, load_rps=99.0) for r in plan.replicas)
        check_plan(data, replace(plan, replicas=loaded))
    with pytest.raises(PlanCheckError, match="A5"):
        more = tuple(replace(s, served_rps=9.0) for s in plan.services)
        check_plan(data, replace(plan, services=more))

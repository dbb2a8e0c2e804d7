"""Allocation against enumeration, every constraint binding once, scarcity, Homo-joint."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase as HypothesisPhase
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.allocation.check import PlanCheckError, check_plan
from planner.allocation.plan import Worth
from planner.allocation.problem import (
    AllocationInput,
    build_allocation,
)
from planner.allocation.solve import plan_allocation
from planner.baselines.homo_joint import plan_homo_joint, plan_never_worse, with_bound_of
from planner.errors import MarketError, NoTemplateError
from planner.types import Market, Phase
from tests.builders import EXACT, offer, template, workload

# Shrinking a case that takes a solver's time would go on for minutes.
NO_SHRINKING = (HypothesisPhase.explicit, HypothesisPhase.reuse, HypothesisPhase.generate)
PRE, DEC = Phase.PREFILL, Phase.DECODE


MOST_COUNTS = 50_000  # that are tried for one case


def counts_to_try(data: AllocationInput) -> tuple[list, list[int]]:
    """Templates by domain, and the most replicas of each."""
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
    return places, [
        min(stock[d, name] // count for name, count in t.combination) for t, d in places
    ]


def enumerate_best(data: AllocationInput) -> tuple[float, float]:
    """(weighted shortfall, cost over the horizon) of the best plan, by trying every count."""
    places, limits = counts_to_try(data)
    stock = {(o.domain, o.node_class): o.stock for o in data.offers}
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
                min(capacity.get((w.name, d, p), 0.0) for p in (PRE, DEC))
                for d in {o.domain for o in data.offers}
            )
            short += w.weight * max(0.0, w.demand_rps - served)
        best = min(best, (round(short, 9), _rent(data, needed)))
    return best


def _rent(data: AllocationInput, needed) -> float:
    """Cheapest way to rent the nodes, by trying every split over the markets of a class."""
    places: dict[tuple[str, str], list] = {}
    for o in data.offers:
        places.setdefault((o.domain, o.node_class), []).append(o)
    return sum(_cheapest(data, offers, needed.get(place, 0)) for place, offers in places.items())


def _cheapest(data: AllocationInput, offers, count: int) -> float:
    best = math.inf
    for split in itertools.product(*(range(min(o.stock, count) + 1) for o in offers)):
        if sum(split) == count:
            best = min(best, sum(_cost(data, o, y) for o, y in zip(offers, split, strict=True)))
    return best


def _cost(data: AllocationInput, o, count: int) -> float:
    held = data.held.get((o.domain, o.instance_type, o.market), 0)
    hours = data.settings.horizon_hours * count
    hours += data.settings.startup_minutes / 60 * max(0, count - held)
    hours += data.settings.drain_minutes / 60 * max(0, held - count)
    return hours * o.price_usd_per_hour


@st.composite
def small_cases(draw) -> AllocationInput:
    demand = st.one_of(st.just(0.0), st.floats(0.1, 5.0))
    number = st.floats(0.5, 4.0).map(lambda v: round(v, 2))
    names = ["A x1", "B x1"]
    templates = []
    for w in ("chat", "code"):
        for phase in (PRE, DEC):
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
        workload("chat", draw(demand), draw(number)),
        workload("code", draw(demand)),
    ]
    held = {}
    if draw(st.booleans()) and offers[0].stock:
        held[offers[0].domain, offers[0].instance_type, offers[0].market] = 1
    data = AllocationInput.of(workloads, templates, offers, held, EXACT)
    assume(math.prod(limit + 1 for limit in counts_to_try(data)[1]) <= MOST_COUNTS)
    return data


@settings(max_examples=60, deadline=None, phases=NO_SHRINKING)
@given(small_cases())
def test_allocation_matches_enumeration(data: AllocationInput) -> None:
    plan = plan_allocation(data)
    short, cost = enumerate_best(data)
    assert plan.weighted_shortfall == pytest.approx(short, abs=1e-4)
    assert plan.objective_usd == pytest.approx(cost, abs=1e-3)
    assert plan.proven


@settings(max_examples=40, deadline=None, phases=NO_SHRINKING)
@given(small_cases())
def test_never_worse_than_homo_joint_on_random_markets(data: AllocationInput) -> None:
    homo = plan_homo_joint(data)
    coral = plan_never_worse(data, homo)
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
    decodes = [r.load_rps["chat"] for r in plan.replicas if r.template.phase is DEC]
    assert sum(decodes) == pytest.approx(2.0)


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
        template(f"{w}-{p}", p, {"A x1": 1}, 1.0, w) for w in ("chat", "code") for p in (PRE, DEC)
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
    assert [(b.limit.offer.node_class, b.used) for b in tight.binding] == [("A x1", 2)]
    # Two more nodes (prefill and decode) would serve one more request/s of weight 1.
    assert tight.binding[0].worth_unit == "requests/s"
    assert tight.binding[0].worth == pytest.approx(0.5)


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
    worth = {b.limit.offer.node_class: b.worth for b in plan.binding}
    assert {b.worth_unit for b in plan.binding} == {"USD/hour"}
    assert worth == {"B x1": pytest.approx(4.0 * (1 + 10 / 60))}


def test_the_search_begins_at_the_start_plan(monkeypatch) -> None:
    """With no time to search, the answer is the start and not the empty plan."""
    rng = np.random.default_rng(5)
    templates = [
        template(f"{p}-{i}", p, {f"N{i} x1": 1, f"N{i + 1} x1": 1}, float(rng.uniform(0.5, 2)))
        for i in range(12)
        for p in (PRE, DEC)
    ]
    offers = [offer(d, f"N{i} x1", float(rng.uniform(1, 3)), 4) for i in range(13) for d in "ab"]
    data = AllocationInput.of([workload("chat", 14.0)], templates, offers, settings=EXACT)
    quick = replace(data, settings=replace(EXACT, relative_gap=0.02))
    start = plan_allocation(quick)
    rushed = replace(data, settings=replace(EXACT, deadline_s=0.01))
    monkeypatch.setattr("planner.allocation.columns.LEAST_SOLVE_S", 0.01)
    again = plan_allocation(rushed, start=start)
    assert again.objective_usd <= start.objective_usd + 1e-6
    assert again.served_share == 1.0


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
        loaded = tuple(replace(r, load_rps={"chat": 99.0}) for r in plan.replicas)
        check_plan(data, replace(plan, replicas=loaded))
    with pytest.raises(PlanCheckError, match="A6"):
        more = tuple(replace(s, served_rps=9.0) for s in plan.services)
        check_plan(data, replace(plan, services=more))


AGG = Phase.AGGREGATED


def test_aggregated_serving_is_chosen_where_it_is_cheaper() -> None:
    both = [
        template("p", PRE, {"A x1": 1}, 2.0),
        template("d", DEC, {"B x1": 1}, 1.0),
        template("m", AGG, {"A x1": 1}, 1.0),
    ]
    offers = [offer("d1", "A x1", 3.0, 5), offer("d1", "B x1", 4.0, 5)]
    plan = plan_allocation(simple(templates=both, offers=offers))
    assert {r.template.phase for r in plan.replicas} == {AGG}
    assert plan.cost_usd_per_hour == pytest.approx(6.0)
    cheap = [offer("d1", "A x1", 3.0, 5), offer("d1", "B x1", 0.5, 5)]
    plan = plan_allocation(simple(templates=both, offers=cheap))
    assert {r.template.phase for r in plan.replicas} == {PRE, DEC}
    assert plan.cost_usd_per_hour == pytest.approx(4.0)


def test_workloads_of_one_model_share_replicas() -> None:
    """A4: half of the replica's time for each workload."""
    mixed = replace(template("m", AGG, {"A x1": 1}, 2.0), shared_rps={"code": 4.0})
    data = AllocationInput.of(
        [workload("chat", 1.0), workload("code", 2.0)],
        [mixed],
        [offer("d1", "A x1", 3.0, 5)],
        settings=EXACT,
    )
    plan = plan_allocation(data)
    assert [r.count for r in plan.replicas] == [1]
    assert plan.replicas[0].load_rps == {"chat": pytest.approx(1.0), "code": pytest.approx(2.0)}
    assert plan.replicas[0].utilization == pytest.approx(1.0)
    assert plan.served_share == 1.0


def test_a_plan_that_is_kept_says_what_binds_in_it() -> None:
    data = simple(workloads=[workload("chat", 9.0)])
    solved = plan_allocation(data)
    kept = with_bound_of(data, replace(solved, worth=Worth()), solved)
    assert [b.limit.text for b in kept.binding] == [b.limit.text for b in solved.binding]
    assert [b.used for b in kept.binding] == [b.used for b in solved.binding]
    assert [b.worth_unit for b in kept.binding] == [b.worth_unit for b in solved.binding]
    assert kept.bound_usd == solved.bound_usd

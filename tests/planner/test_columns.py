"""The column solver against the full model, its bounds, and its parts."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from planner.allocation import search
from planner.allocation.columns import limited
from planner.allocation.decomposition import REST, Decomposition
from planner.allocation.dive import dive
from planner.allocation.full_model import plan_with_full_model
from planner.allocation.model import AllocationModel
from planner.allocation.options import AllocationOptions, Quota, ServiceRules
from planner.allocation.problem import AllocationInput, RunningReplicas
from planner.allocation.relaxation import Relaxer, relax
from planner.allocation.search import Effort, Search
from planner.allocation.solve import plan_allocation
from planner.programs import solve_program
from planner.types import Market, Phase
from tests.builders import EXACT, offer, template, workload

PHASES = (Phase.PREFILL, Phase.DECODE, Phase.AGGREGATED)


def random_input(seed: int, *, domains: int = 3, classes: int = 4) -> AllocationInput:
    """Three workloads (two of them share replicas), mixed templates, held nodes, options."""
    rng = np.random.default_rng(seed)
    names = [f"N{n} x1" for n in range(classes)]
    templates = []
    for number in range(12):
        counts = {str(n): int(rng.integers(1, 3)) for n in rng.choice(names, 2, replace=False)}
        owner = ("chat", "code", "mail")[number % 3]
        phase = PHASES[int(rng.integers(0, 3))] if number >= 9 else PHASES[number // 3]
        made = template(f"t{number}", phase, counts, float(rng.uniform(0.5, 4.0)), owner)
        if owner != "mail" and rng.random() < 0.5:
            other = {"chat": "code", "code": "chat"}[owner]
            made = replace(made, shared_rps={other: float(rng.uniform(0.5, 4.0))})
        templates.append(made)
    offers, held = [], {}
    for d in range(domains):
        for name in names:
            price, stock = float(rng.uniform(1.0, 5.0)), int(rng.choice([0, 1, 3, 6]))
            on_demand = replace(offer(f"d{d}", name, price, stock), vcpus=4)
            offers.append(on_demand)
            if rng.random() < 0.4:
                spot = replace(on_demand, market=Market.SPOT, price_usd_per_hour=0.6 * price)
                offers.append(spot)
            if stock and rng.random() < 0.2:
                held[f"d{d}", on_demand.instance_type, Market.ON_DEMAND] = 1
    running = [
        RunningReplicas(made, f"d{int(rng.integers(0, domains))}", int(rng.integers(1, 3)))
        for made in templates
        if rng.random() < 0.3
    ]
    options = (
        AllocationOptions(),
        AllocationOptions(quotas=(Quota(vcpus=40, domains="d0"),)),
        AllocationOptions(largest_spot_share=0.5),
        AllocationOptions(budget_usd_per_hour=60.0),
    )[seed % 4]
    rules = {"chat": ServiceRules(largest_domain_share=0.6)} if seed % 3 == 0 else {}
    workloads = [
        workload("chat", float(rng.uniform(0.5, 6.0)), weight=2.0),
        workload("code", float(rng.uniform(0.5, 3.0))),
        workload("mail", float(rng.uniform(0.5, 3.0))),
    ]
    return AllocationInput.of(workloads, templates, offers, held, EXACT, options, rules, running)


@pytest.mark.parametrize("seed", range(40))
def test_columns_and_the_full_model_find_the_same(seed: int) -> None:
    data = random_input(seed)
    mine, full = plan_allocation(data), plan_with_full_model(data)
    demand = data.weighted_demand
    assert mine.weighted_shortfall == pytest.approx(full.weighted_shortfall, abs=2e-4 * demand)
    if abs(mine.weighted_shortfall - full.weighted_shortfall) < 1e-6 * demand:
        assert mine.objective_usd == pytest.approx(full.objective_usd, rel=1e-4)
    assert mine.bound_usd <= full.objective_usd * (1 + 1e-4)
    assert mine.proven


@pytest.mark.parametrize("seed", range(12))
def test_relaxation_by_columns_is_that_of_all_columns(seed: int) -> None:
    model = AllocationModel(random_input(seed))
    for cost in (model.shortfall, model.program.cost + 50.0 * model.shortfall):
        program = replace(model.program, cost=cost)
        whole = solve_program(program, relax=True).objective
        assert relax(model, program).objective == pytest.approx(whole, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("by", ["domain", "family"])
def test_blocks_bound_the_optimum_and_no_less_than_the_relaxation(seed: int, by: str) -> None:
    model = AllocationModel(random_input(seed))
    program = replace(model.program, cost=model.program.cost + 50.0 * model.shortfall)
    optimum = solve_program(program, relative_gap=1e-9).objective
    relaxation = relax(model, program)
    blocks = Decomposition(program, getattr(model, by), relaxation.duals)
    first = blocks.evaluate(blocks.prices, 5.0)
    assert relaxation.objective - 1e-4 * optimum <= first  # blocks are solved within their gap
    for _ in range(4):
        blocks.evaluate(blocks.next_prices(), 5.0)
    assert first <= blocks.bound <= optimum * (1 + 1e-6) + 1e-6
    found = blocks.recombine(5.0, 1e-6, np.inf)
    if found is not None:
        assert program.cost @ found >= optimum - 1e-6
        used = program.matrix @ found
        assert (used <= program.row_upper + 1e-6).all()
        assert (used >= program.row_lower - 1e-6).all()


def test_every_column_is_in_one_block_or_in_none() -> None:
    model = AllocationModel(random_input(3))
    duals = np.zeros(model.program.row_lower.size)
    blocks = Decomposition(model.program, model.domain, duals)
    columns = np.concatenate([blocks.rest.columns, *(b.columns for b in blocks.blocks)])
    assert sorted(columns.tolist()) == list(range(model.program.columns))
    assert (model.domain[blocks.rest.columns] == REST).all()
    # Workloads that share replicas are one block.
    chat, code = (i for i, w in enumerate(model.data.workloads) if w.name in {"chat", "code"})
    short = model.parts.short
    assert model.family[short[chat]] == model.family[short[code]]


def test_a_plan_and_its_values_are_the_same() -> None:
    data = random_input(5)
    plan, model = plan_allocation(data), AllocationModel(data)
    values = model.values_of(plan)
    assert model.program.cost @ values == pytest.approx(plan.objective_usd, rel=1e-6)
    assert model.shortfall @ values == pytest.approx(plan.weighted_shortfall, abs=1e-6)
    used = model.program.matrix @ values
    assert (used <= model.program.row_upper + 1e-4).all()
    assert (used >= model.program.row_lower - 1e-4).all()


def test_a_search_without_time_keeps_its_start_and_says_so() -> None:
    data = random_input(8)
    model = AllocationModel(data)
    program = replace(model.program, cost=model.program.cost + 50.0 * model.shortfall)
    search = Search(model, program, 0.0, 1.0, Effort())
    assert search.offer(model.nothing())
    search.run(deadline=0.0)
    assert search.objective == pytest.approx(float(program.cost @ model.nothing()))
    assert not search.done
    assert search.bound <= search.objective


def test_two_better_parts_of_one_plan_come_together() -> None:
    """Two neighbourhoods of the same plan, solved side by side, each serve one workload more."""
    made = [
        template("a", Phase.AGGREGATED, {"A x1": 1}, 1.0, "chat"),
        template("b", Phase.AGGREGATED, {"B x1": 1}, 1.0, "code"),
    ]
    offers = [offer("d1", "A x1", 1.0, 2), offer("d1", "B x1", 1.0, 2)]
    data = AllocationInput.of(
        [workload("chat", 1.0), workload("code", 1.0)], made, offers, settings=EXACT
    )
    model = AllocationModel(data)
    program = replace(model.program, cost=model.program.cost + 50.0 * model.shortfall)
    search = Search(model, program, 0.0, 1.0, Effort())
    base = search._completed(np.zeros(2))
    search.offer(base)
    for counts in ((1.0, 0.0), (0.0, 1.0)):
        search._offer_part(search._completed(np.array(counts)), base)
    assert model.replicas_of(search.values) == {(0, "d1"): 1, (1, "d1"): 1}


def test_a_search_gives_up_after_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "TINY", 0)
    monkeypatch.setattr(search, "SMALL", 0)
    model = AllocationModel(random_input(8))
    program = replace(model.program, cost=model.program.cost + 50.0 * model.shortfall)
    found = Search(model, program, 0.0, 1.0, Effort())
    monkeypatch.setattr(Search, "done", property(lambda _: False))
    started = time.perf_counter()
    found.run(started + 60.0, patience_s=0.5)
    assert time.perf_counter() - started < 45.0
    assert np.isfinite(found.objective)


def test_the_plan_says_how_it_was_found() -> None:
    plan = plan_allocation(random_input(2))
    assert plan.columns_seen > 0
    assert plan.phase_seconds["relaxation"] >= 0.0
    times = [entry[0] for entry in plan.history]
    assert times == sorted(times)
    assert plan.history[-1][2] == pytest.approx(plan.objective_usd, rel=1e-4)


def test_idle_nodes_make_no_room_for_spot() -> None:
    cheap = offer("d1", "B x1", 0.1, 9)  # no template uses it
    spot = replace(offer("d1", "A x1", 1.0, 4), market=Market.SPOT)
    made = [template("a", Phase.AGGREGATED, {"A x1": 1}, 1.0)]
    half = AllocationOptions(largest_spot_share=0.5)
    for offers in ([offer("d1", "A x1", 10.0, 4), spot, cheap], [spot, cheap]):
        data = AllocationInput.of([workload("chat", 2.0)], made, offers, {}, EXACT, half)
        mine, full = plan_allocation(data), plan_with_full_model(data)
        assert mine.weighted_shortfall == pytest.approx(full.weighted_shortfall, abs=1e-6)
        assert mine.objective_usd == pytest.approx(full.objective_usd, abs=1e-6)
        assert mine.bound_usd == pytest.approx(full.bound_usd, abs=1e-4)


def test_the_last_sliver_of_demand_is_served_though_it_is_dear() -> None:
    made = [template("a", Phase.AGGREGATED, {"A x1": 1}, 1.0)]
    data = AllocationInput.of(
        [workload("chat", 1.05)], made, [offer("d1", "A x1", 1.0, 4)], settings=EXACT
    )
    plan = plan_allocation(data)
    assert plan.served_share == pytest.approx(1.0)
    assert plan.proven


def test_replicas_that_serve_nobody_any_more_are_a_start_all_the_same() -> None:
    data = random_input(5)
    plan = plan_allocation(data)
    served = {w for r in plan.replicas for w in r.load_rps}
    gone = next(name for name in ("mail", "code", "chat") if name in served)
    fewer = tuple(replace(w, demand_rps=0.0) if w.name == gone else w for w in data.workloads)
    again = plan_allocation(replace(data, workloads=fewer), start=plan)
    assert again.proven


def test_shared_replicas_keep_a_least_served_share() -> None:
    made = replace(
        template("a", Phase.AGGREGATED, {"A x1": 1}, 2.0, "chat"), shared_rps={"code": 2.0}
    )
    data = AllocationInput.of(
        [workload("chat", 2.0, weight=10.0), workload("code", 1.0)], [made],
        [offer("d1", "A x1", 1.0, 1)], {}, EXACT, None, {"code": ServiceRules(least_served=0.5)},
    )  # fmt: skip
    share = {s.workload: s.share for s in plan_allocation(data).services}
    assert share["code"] == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_a_relaxation_that_goes_on_from_others_is_the_same(seed: int) -> None:
    model = AllocationModel(random_input(seed))
    relaxer = Relaxer(model)
    for dear in (0.0, 50.0, 5.0):
        for most in (np.inf, 0.5 * model.data.weighted_demand):
            program = replace(model.program, cost=model.program.cost + dear * model.shortfall)
            program = limited(program, model, most)
            whole = solve_program(program, relax=True)
            if whole.values is not None and (np.isinf(most) or dear == 50.0):
                found = relaxer.solve(program)
                assert found.objective == pytest.approx(whole.objective, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_a_dive_leaves_whole_replicas_that_fit_and_a_relaxation_above_the_first(seed: int) -> None:
    model = AllocationModel(random_input(seed))
    program = replace(model.program, cost=model.program.cost + 50.0 * model.shortfall)
    relaxer = Relaxer(model)
    first = relaxer.solve(program)
    dived = dive(model, program, relaxer, first, time.perf_counter() + 5.0)
    x = model.parts.replicas
    assert (dived.base[x] == np.rint(dived.base[x])).all()
    assert not dived.base[~model.is_replica].any()
    used = np.zeros_like(model.available)
    np.add.at(used, model.domain[x], model.counts[model.template[x]] * dived.base[x, None])
    assert (used <= model.available + 1e-9).all()
    assert dived.relaxation.objective >= first.objective - 1e-6 * abs(first.objective) - 1e-9
    assert (dived.relaxation.values[x] >= dived.base[x] - 1e-6).all()


def test_large_plans_are_made_by_dives_and_keep_every_limit(monkeypatch) -> None:
    monkeypatch.setattr(search, "TINY", 0)
    monkeypatch.setattr(search, "SMALL", 0)
    monkeypatch.setattr(search, "MANY_REPLICAS", 0)
    data = random_input(4)
    data = replace(data, settings=replace(data.settings, deadline_s=2.0, relative_gap=0.05))
    plan = plan_allocation(data)  # rechecked on its integers
    assert "dive" in plan.phase_seconds
    optimum = plan_with_full_model(data)
    assert plan.bound_usd <= optimum.objective_usd * (1 + 1e-4)

"""Replays: how a fleet's replicas and nodes come and go, and a replay of two hours."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from catalog.store import Catalog
from coral.render_evaluation import evaluation_summary, print_evaluation
from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, node_key
from planner.allocation.solve import plan_allocation
from planner.errors import InputError
from planner.types import Market, Phase
from simulator.run import EventKind
from tasks.evaluation import PLANNERS, Evaluation, Replay, evaluate_days
from tasks.evaluation_fleet import FleetHistory
from tasks.inputs import Inputs, load_inputs
from tasks.library import build_phase
from tasks.scenario_file import read_scenario
from tasks.solving import Solvers
from tests.builders import EXACT, offer, template, workload
from tests.simulator.fleets import engine

AGG = Phase.AGGREGATED
ONE = template("one", AGG, {"A x1": 1}, 1.0)
PAIR = template("pair", AGG, {"A x1": 1, "B x1": 1}, 3.0)
OFFERS = [
    offer("d", "A x1", 1.0, 9, Market.SPOT),
    offer("d", "A x1", 2.0, 9),
    offer("d", "B x1", 1.0, 9),
]
CLASSES = {"type-A x1": "A x1", "type-B x1": "B x1"}
ENGINES = {(key, "d"): [engine("x")] for key in ("one", "pair")}
SPOT_A = node_key(OFFERS[0])


def plan(demand: float, *templates) -> Plan:
    data = AllocationInput.of([workload("chat", demand)], templates, OFFERS, settings=EXACT)
    return plan_allocation(data)


def test_replicas_start_end_and_keep_their_names() -> None:
    fleet = FleetHistory(CLASSES, startup_hours=0.5)
    fleet.follow(plan(3.0, ONE), 0.0, ENGINES)
    first = [instance.name for instance in fleet.alive]
    assert len(first) == 3 and fleet.nodes == Counter({SPOT_A: 3})
    assert fleet.events() == []  # the first ones serve from the beginning
    fleet.follow(plan(5.0, ONE), 1.0, ENGINES)
    assert [instance.name for instance in fleet.alive][:3] == first
    assert [(e.kind, e.at_s) for e in fleet.events()] == [(EventKind.STARTED, 1.5 * 3600)] * 2
    fleet.follow(plan(2.0, ONE), 2.0, ENGINES)
    assert [instance.name for instance in fleet.alive] == first[:2]
    drained = [e for e in fleet.events() if e.kind is EventKind.DRAINED]
    assert len(drained) == 3 and {e.at_s for e in drained} == {2.5 * 3600}
    assert fleet.nodes == Counter({SPOT_A: 2})
    last = fleet.plans[-1]
    assert last.at_s == 2.5 * 3600 and len(last.weights) == 2
    assert sum(sum(w.values()) for w in last.weights.values()) == pytest.approx(2.0)


def test_lost_nodes_take_the_youngest_replicas() -> None:
    fleet = FleetHistory(CLASSES, startup_hours=0.5)
    fleet.follow(plan(9.0, PAIR), 0.0, ENGINES)
    assert len(fleet.alive) == 3
    fleet.lose(OFFERS, {SPOT_A: 2}, 1.25)
    assert fleet.lost_nodes == 1 and len(fleet.alive) == 2
    died = [e for e in fleet.events() if e.kind is EventKind.DIED]
    assert [(e.at_s, e.engine) for e in died] == [(1.25 * 3600, fleet.instances[2].engines[0].name)]
    # Its other node is held still, and of use to the next plan.
    assert sum(fleet.nodes.values()) == 5
    fleet.lose(OFFERS, {SPOT_A: 2}, 1.3)
    assert fleet.lost_nodes == 1
    fleet.follow(plan(9.0, PAIR), 2.0, ENGINES)
    assert len(fleet.alive) == 3 and sum(fleet.nodes.values()) == 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Catalog, Inputs]:
    catalog = Catalog(tmp_path_factory.mktemp("tiny"))
    spec = read_scenario("tiny").model_copy(update={"markets": (Market.ON_DEMAND, Market.SPOT)})
    inputs = load_inputs(catalog, spec)
    with Solvers(workers=0) as solvers:
        for phase in inputs.phases:
            build_phase(catalog, phase, solvers)
    return catalog, inputs


@pytest.fixture(scope="module")
def replayed(tiny: tuple[Catalog, Inputs]) -> Evaluation:
    return evaluate_days(*tiny, Replay(hours=2.0, demand=0.5, deadline_s=2.0, seed=3))


def test_every_planner_serves_the_same_requests(tiny, replayed: Evaluation, capsys) -> None:
    catalog, _ = tiny
    by_planner = [replayed.of(planner) for planner in PLANNERS]
    assert [len(mine) for mine in by_planner] == [4, 4, 4]
    for same in zip(*by_planner, strict=True):
        assert len({(each.hours, each.requests) for each in same}) == 1
        assert same[0].requests > 100
    coral = by_planner[0]
    assert all(each.usd_per_hour > 0 for each in coral)
    # The market takes one node: it is planned at once, not only at the next interval.
    assert [each.lost_nodes for each in coral] == [0, 1, 0, 0]
    assert [each.plans for each in coral] == [1, 2, 1, 1]
    assert all(0.0 <= each.attainment <= 1.0 for each in replayed.intervals)
    _, rows = catalog.query(
        "SELECT count(*) FROM evaluation WHERE evaluation_id = ?", [replayed.id]
    )
    assert rows == [(12,)]
    assert replayed.table is not None and len(pl.read_csv(replayed.table)) == 12
    assert replayed.plot is not None and replayed.plot.stat().st_size > 10_000
    assert replayed.market is not None
    market = pl.read_parquet(replayed.market)
    assert market["source"].str.starts_with("synthetic, seed 3").all()
    assert set(evaluation_summary(replayed)["planners"]) == set(PLANNERS)
    print_evaluation(replayed)
    assert "synthetic" in capsys.readouterr().out


def test_the_same_replay_again(tiny, replayed: Evaluation) -> None:
    again = evaluate_days(*tiny, Replay(hours=2.0, demand=0.5, deadline_s=2.0, seed=3))

    def plain(found: Evaluation):
        return [replace(each, solve_s=0.0) for each in found.intervals]

    assert plain(again) == plain(replayed)


def test_nothing_to_replay(tiny, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to replan"):
        evaluate_days(*tiny, Replay(hours=0.2, every_minutes=30.0))

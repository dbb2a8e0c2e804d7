"""Plans read the refreshed market, and launches teach what can be had."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from catalog.market.reads import read_launches
from catalog.store import Catalog
from executor.apply import ALL_DOWN, REFUSED
from executor.fleet import NoCapacityError
from executor.simulated import SimulatedFleet
from planner.availability import LaunchOutcome
from planner.catch_up import NODE_GONE
from planner.errors import MarketError
from planner.leases import Lease, LeaseState
from planner.market import MarketSpec
from planner.resolve import Scenario
from planner.scenario import FleetSpec, ScenarioSpec
from planner.types import Market
from tasks.inputs import load_inputs
from tasks.market.launches import remember_launches, results_of
from tasks.market.refresh import refresh
from tasks.operating import lease_store, operate_once
from tasks.scenario_file import read_scenario
from tests.support.aws_server import AwsServer
from tests.support.library import build_library, catalog_with

NOW = datetime.now(UTC)


def spec(**changes) -> ScenarioSpec:
    base = read_scenario("tiny")
    stock = base.stock.model_copy(update={"factor": 1.0})
    return base.model_copy(update={"stock": stock, **changes})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with the templates of tiny."""
    return build_library(tmp_path_factory.mktemp("library"), spec())


@pytest.fixture
def catalog(library: Path, tmp_path: Path) -> Catalog:
    return catalog_with(library, tmp_path)


def live(*sources: str, **more) -> ScenarioSpec:
    return spec(market=MarketSpec(sources=sources or ("aws", "snapshot"), **more))


def test_a_scenario_without_a_market_plans_as_before(aws: AwsServer, catalog: Catalog) -> None:
    before = load_inputs(catalog, spec()).scenario
    refresh(catalog, MarketSpec(sources=("aws",)), NOW)
    after = load_inputs(catalog, spec())
    assert after.scenario == before
    assert [feed.source for feed in after.feeds] == ["snapshot"]
    assert after.feeds[0].note == ""


def test_a_plan_reads_the_refreshed_prices(aws: AwsServer, catalog: Catalog) -> None:
    domain = spec().domains[0]
    assert domain.startswith("aws:")
    aws.data.on_demand = {key: 0.9 * usd for key, usd in aws.data.on_demand.items()}
    refresh(catalog, MarketSpec(sources=("aws",)), NOW)
    shipped = load_inputs(catalog, spec()).scenario.offers
    mine = load_inputs(catalog, live(), NOW)
    prices = {
        (o.domain, o.instance_type): o.price_usd_per_hour
        for o in mine.scenario.offers if o.market is Market.ON_DEMAND
    }  # fmt: skip
    cheaper = [
        (o.domain, o.instance_type) for o in shipped
        if o.market is Market.ON_DEMAND
        and prices.get((o.domain, o.instance_type)) == pytest.approx(0.9 * o.price_usd_per_hour)
    ]  # fmt: skip
    assert cheaper
    assert mine.prices_at == NOW
    assert mine.offers_rejected[""] == sum(feed.used for feed in mine.feeds)


def test_stock_is_what_scores_and_quotas_leave_and_says_why(
    aws: AwsServer, catalog: Catalog
) -> None:
    aws.scores = dict.fromkeys(aws.enabled, 2)
    aws.quotas = {(region, "L-3819A6DF"): 64.0 for region in aws.enabled}
    refresh(catalog, MarketSpec(sources=("aws",)), NOW)
    both = {"markets": (Market.ON_DEMAND, Market.SPOT)}
    wide = live().model_copy(update=both)
    shipped = {
        (o.domain, o.instance_type, o.market): o
        for o in load_inputs(catalog, spec(**both)).scenario.offers
    }
    scenario = load_inputs(catalog, wide, NOW + timedelta(minutes=1)).scenario
    spot = [o for o in scenario.offers if o.market is Market.SPOT and o.domain.startswith("aws")]
    assert spot
    for offer in spot:
        key = (offer.domain, offer.instance_type, offer.market)
        assert "placement score 2 of 10" in offer.stock_source or offer.stock == 1
        if key in shipped:
            assert offer.stock <= shipped[key].stock
    assert any("64 spot vCPUs" in quota.describe() for quota in scenario.options.quotas)
    assert scenario.stock_note.endswith("less what placement scores and quotas take off")
    again = load_inputs(catalog, wide, NOW + timedelta(minutes=5)).scenario
    assert again.offers == scenario.offers  # ages change nothing that a plan depends on


def test_old_prices_are_called_stale_and_used(aws: AwsServer, catalog: Catalog) -> None:
    refresh(catalog, MarketSpec(sources=("aws",)), NOW)
    fresh = load_inputs(catalog, live(), NOW + timedelta(minutes=59))
    stale = load_inputs(catalog, live(), NOW + timedelta(hours=5))
    assert [feed.note for feed in fresh.feeds] == ["", ""]
    assert stale.feeds[0].note == "prices of aws are stale: 5 h old"
    assert {o.price_usd_per_hour for o in stale.scenario.offers} == {
        o.price_usd_per_hour for o in fresh.scenario.offers
    }
    longer = live(stale_after_minutes={"aws": 600})
    assert load_inputs(catalog, longer, NOW + timedelta(hours=5)).feeds[0].note == ""


def test_a_source_that_never_answered_gives_way_and_says_so(catalog: Catalog) -> None:
    found = load_inputs(catalog, live())
    assert found.scenario.offers == load_inputs(catalog, spec()).scenario.offers
    assert found.feeds[0].note == "aws has not answered yet (`coral market refresh`)"
    with pytest.raises(MarketError, match="no prices yet of aws: run `coral market refresh`"):
        load_inputs(catalog, live("aws"))


def lease(number: int, state: LeaseState, **more) -> Lease:
    values = {
        "id": f"lease-{number}", "domain": "aws:us-east-1", "instance_type": "g6.xlarge",
        "node_class": "L4 x1", "market": Market.SPOT, "price_usd_per_hour": 0.3, "state": state,
        "created_at": NOW, "zone": "use1-az6",
    }  # fmt: skip
    return Lease(**{**values, **more})


def test_leases_tell_what_became_of_launches() -> None:
    later = NOW + timedelta(hours=1)
    found = results_of(
        [
            lease(1, LeaseState.PLANNED),
            lease(2, LeaseState.READY, instance_id="i-2"),
            lease(3, LeaseState.FAILED, ended_at=NOW, reason="no capacity for g6.xlarge"),
            lease(4, LeaseState.FAILED, ended_at=NOW, reason=f"{REFUSED}no such image"),
            lease(5, LeaseState.TERMINATED, instance_id="i-5", ended_at=later, reason=NODE_GONE),
            lease(6, LeaseState.TERMINATED, instance_id="i-6", ended_at=later, reason=ALL_DOWN),
            lease(7, LeaseState.FAILED, domain="local:here", ended_at=NOW),
        ]
    )
    assert [(one.lease_id, one.outcome.value, one.at) for one in found] == [
        ("lease-2", "launched", NOW), ("lease-3", "no_capacity", NOW),
        ("lease-5", "launched", NOW), ("lease-5", "preempted", later),
        ("lease-6", "launched", NOW),
    ]  # fmt: skip


def round_at(catalog: Catalog, scenario: ScenarioSpec, minutes: int):
    now = NOW + timedelta(minutes=minutes)
    remember_launches(catalog)
    return operate_once(catalog, scenario, load_inputs(catalog, scenario, now), now)


def failing_in(places: set[tuple]) -> Callable:
    """Launches in some places find no capacity."""
    launch = SimulatedFleet.launch

    def scarce(self: SimulatedFleet, one: Lease, now: datetime):
        if (one.domain, one.zone, one.instance_type, one.market) in places:
            raise NoCapacityError(f"no capacity for {one.instance_type}")
        return launch(self, one, now)

    return scarce


def places_of(scenario: Scenario) -> set[tuple]:
    return {(o.domain, o.zone, o.instance_type, o.market) for o in scenario.offers}


def once(**changes: object) -> FleetSpec:
    """A fleet whose rounds make one plan."""
    return read_scenario("tiny").fleet.model_copy(update={"plans_per_round": 1, **changes})


def test_the_next_round_plans_around_what_could_not_be_launched(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = round_at(catalog, spec(name="peek"), 0).decision.coral.nodes
    lost = {(n.offer.domain, n.offer.zone, n.offer.instance_type, n.offer.market) for n in chosen}
    monkeypatch.setattr("executor.simulated.SimulatedFleet.launch", failing_in(lost))
    first = round_at(catalog, spec(fleet=once()), 0)
    assert first.applied.failed > 0
    assert first.nodes == 0
    with catalog.read() as connection:
        failures = read_launches(connection, NOW - timedelta(minutes=1))
    assert {r.place for r in failures if r.outcome is LaunchOutcome.NO_CAPACITY} == lost
    inputs = load_inputs(catalog, spec(), NOW + timedelta(minutes=10))
    assert places_of(inputs.scenario).isdisjoint(lost)
    assert "found no capacity" in inputs.scenario.avoided
    second = round_at(catalog, spec(), 10)
    assert second.applied.failed == 0
    assert second.applied.launched == second.nodes > 0
    late = load_inputs(catalog, spec(), NOW + timedelta(minutes=16))
    assert lost <= places_of(late.scenario)


def test_no_minutes_try_the_same_again(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = spec(fleet=once(failure_rate=1.0), market=MarketSpec(avoid_minutes=0.0))
    first = round_at(catalog, stubborn, 0)
    assert first.applied.failed > 0
    second = round_at(catalog, stubborn, 10)
    assert second.applied.failed == first.applied.failed


def test_launches_are_remembered_also_after_a_kill(catalog: Catalog) -> None:
    store = lease_store(catalog)
    store.save(lease(3, LeaseState.FAILED, ended_at=NOW, reason="no capacity"), NOW)
    assert remember_launches(catalog) == 1
    assert remember_launches(catalog) == 0

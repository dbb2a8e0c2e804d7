"""How many nodes can be had, and for how long a place is avoided."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from planner.availability import (
    Avoided,
    Evidence,
    LaunchOutcome,
    LaunchResult,
    PlacementScore,
    QuotaState,
    avoided_places,
    describe_avoided,
    estimate_nodes,
)
from planner.errors import MarketError, ScenarioError
from planner.known import Known
from planner.resolve import resolve_scenario
from planner.scenario import ScenarioSpec
from planner.types import Market
from tasks.scenario_file import parse_scenario, read_scenario

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
PLACE = ("aws:us-east-1", "use1-az6", "g6.xlarge", Market.SPOT)
NO_CAPACITY, LAUNCHED = LaunchOutcome.NO_CAPACITY, LaunchOutcome.LAUNCHED


def seen(minutes: float, outcome: LaunchOutcome = NO_CAPACITY, lease: str = "a") -> LaunchResult:
    return LaunchResult(lease, NOW + timedelta(minutes=minutes), *PLACE, outcome)


def lasting(results: list[LaunchResult], at_minutes: float) -> float | None:
    """Minutes from the last failure for which the place is still avoided; None: it is not."""
    found = avoided_places(results, NOW + timedelta(minutes=at_minutes), 15.0)
    if not found:
        return None
    return (found[PLACE].until - results[-1].at) / timedelta(minutes=1)


def test_a_launch_without_capacity_is_avoided_for_minutes_and_then_not() -> None:
    assert lasting([seen(0)], 14.9) == 15.0
    assert lasting([seen(0)], 15.0) is None


def test_failures_in_a_row_double_the_time_up_to_eight_times() -> None:
    results, at, spans = [], 0.0, []
    for _ in range(6):
        results.append(seen(at))
        span = lasting(results, at)
        assert span is not None
        spans.append(span)
        at += span  # tried again as soon as it is over
    assert spans == [15.0, 30.0, 60.0, 120.0, 120.0, 120.0]


def test_failures_of_one_round_count_once() -> None:
    assert lasting([seen(0, lease=str(i)) for i in range(9)], 1) == 15.0
    found = avoided_places([seen(0), seen(3), seen(9)], NOW + timedelta(minutes=9), 15.0)
    assert found[PLACE].until == NOW + timedelta(minutes=15)
    assert found[PLACE].failures == 1


def test_a_launch_that_came_up_ends_it_and_the_row_of_failures() -> None:
    assert lasting([seen(0), seen(5, LAUNCHED)], 6) is None
    assert lasting([seen(0), seen(16, LAUNCHED), seen(17)], 18) == 15.0
    # Some nodes came and then no more: what failed last counts.
    assert lasting([seen(0, LAUNCHED), seen(0)], 1) == 15.0


def test_a_failure_long_after_the_last_begins_anew() -> None:
    assert lasting([seen(0), seen(15 + 121)], 137) == 15.0


def test_a_node_taken_away_is_avoided_too() -> None:
    found = avoided_places([seen(0, LaunchOutcome.PREEMPTED)], NOW, 15.0)
    assert found[PLACE].why is LaunchOutcome.PREEMPTED
    assert "was taken away" in describe_avoided(list(found.values()))


def test_no_minutes_avoid_nothing() -> None:
    assert avoided_places([seen(0)], NOW, 0.0) == {}


def nodes(market: Market = Market.SPOT, evidence: Evidence | None = None, **more) -> tuple:
    found = estimate_nodes(
        *PLACE[:1],
        PLACE[2],
        market,
        4,
        24,
        "assumed, level limited",
        evidence or Evidence(),
        **more,
    )
    return found.nodes, found.why


def test_the_unknown_stays_the_assumption() -> None:
    assert nodes() == (24, "assumed, level limited")


@pytest.mark.parametrize(("score", "left"), [(10, 24), (7, 16), (3, 7), (1, 2)])
def test_a_placement_score_takes_its_share_of_spot_nodes(score: int, left: int) -> None:
    evidence = Evidence(scores={PLACE[::2][:2]: PlacementScore(score, 8, ("g6.xlarge",))})
    assert nodes(evidence=evidence)[0] == left
    assert nodes(Market.ON_DEMAND, evidence)[0] == 24
    said = f"placement score {score} of 10: {left} of 24"
    assert (said in nodes(evidence=evidence)[1]) is (score < 10)


def test_a_low_score_leaves_one_node_of_few() -> None:
    evidence = Evidence(scores={PLACE[::2][:2]: PlacementScore(1, 8, ("g6.xlarge",))})
    assert nodes(evidence=evidence, stated=3) == (
        1, "stated by the source of the price; placement score 1 of 10: 1 of 3"
    )  # fmt: skip


def quota(limit: float, used: float = 0.0, **more) -> QuotaState:
    base = QuotaState(PLACE[0], "G and VT", "g*", Market.SPOT, limit, used)
    return replace(base, **more)


def test_a_quota_leaves_what_others_do_not_use() -> None:
    assert nodes(evidence=Evidence(quotas=[quota(64, 24)])) == (
        10, "assumed, level limited; quota G and VT leaves 40 vCPUs: 10"
    )  # fmt: skip
    assert nodes(evidence=Evidence(quotas=[quota(64, 80)]))[0] == 0
    assert nodes(evidence=Evidence(quotas=[quota(4, instance_types="p*")]))[0] == 24
    assert nodes(evidence=Evidence(quotas=[quota(4, market=Market.ON_DEMAND)]))[0] == 24
    assert nodes(evidence=Evidence(quotas=[quota(4, domain="aws:eu-west-1")]))[0] == 24


def test_a_stated_stock_replaces_the_assumption() -> None:
    assert nodes(stated=2) == (2, "stated by the source of the price")
    assert nodes(stated=0)[0] == 0


def spec(**more) -> ScenarioSpec:
    return read_scenario("core").model_copy(update=more)


def avoid(known: Known, *places) -> Known:
    later = NOW + timedelta(minutes=9)
    avoided = {place: Avoided(place, 1, later, NO_CAPACITY) for place in places}
    return replace(known, evidence=Evidence(avoided=avoided))


def test_an_avoided_zone_gives_way_to_the_next_cheapest(known: Known) -> None:
    base = resolve_scenario(spec(), known)
    spot = next(
        o for o in base.offers
        if o.market is Market.SPOT and o.zone and len(_zones(known, o)) > 1
    )  # fmt: skip
    place = (spot.domain, spot.zone, spot.instance_type, spot.market)
    other = resolve_scenario(spec(), avoid(known, place))
    found = next(
        o for o in other.offers
        if (o.domain, o.instance_type, o.market) == (spot.domain, spot.instance_type, spot.market)
    )  # fmt: skip
    assert found.zone in _zones(known, spot) - {spot.zone}
    assert found.price_usd_per_hour >= spot.price_usd_per_hour
    assert spot.zone in other.avoided


def test_an_offer_whose_zones_are_all_avoided_is_left_out(known: Known) -> None:
    base = resolve_scenario(spec(), known)
    spot = next(o for o in base.offers if o.market is Market.SPOT)
    kind = (spot.domain, spot.instance_type, spot.market)
    whole = (spot.domain, None, spot.instance_type, spot.market)
    zones = [(spot.domain, z, spot.instance_type, spot.market) for z in _zones(known, spot)]
    for places in ([whole], zones):
        found = resolve_scenario(spec(), avoid(known, *places))
        left = [o for o in found.offers if (o.domain, o.instance_type, o.market) == kind]
        assert left == []
        assert len(found.offers) == len(base.offers) - 1


def test_where_everything_is_avoided_everything_is_tried_again(known: Known) -> None:
    base = resolve_scenario(spec(), known)
    places = [(o.domain, None, o.instance_type, o.market) for o in base.offers]
    assert resolve_scenario(spec(), avoid(known, *places)).offers == base.offers


def test_live_quotas_are_limits_of_the_plan_where_they_cover_an_offer(known: Known) -> None:
    evidence = Evidence(quotas=[quota(96, 32), quota(8, instance_types="x*")])
    found = resolve_scenario(spec(), replace(known, evidence=evidence))
    assert [q.describe() for q in found.options.quotas] == [
        "quota of 64 spot vCPUs for g* in aws:us-east-1"
    ]
    mine = [o for o in found.offers if (o.domain, o.market) == (PLACE[0], Market.SPOT)]
    assert all(o.stock * o.vcpus <= 64 for o in mine if o.instance_type.startswith("g"))


@pytest.mark.parametrize(
    ("market", "message"),
    [
        ({"sources": ["awss"]}, "unknown source 'awss'; did you mean 'aws'?"),
        ({"sources": ["aws", "aws"]}, "source 'aws' is there twice"),
        ({"sources": []}, "at least 1 item"),
        ({"sources": ["aws"], "stale_after_minutes": {"gcp": 5}}, "'gcp', which is no source"),
        ({"largest_jump": 1.0}, "greater than 1"),
        ({"source": "aws"}, "unknown key 'market.source'; did you mean 'sources'?"),
    ],
)  # fmt: skip
def test_a_market_that_cannot_be_is_named(market: dict, message: str) -> None:
    content = read_scenario("tiny").model_dump(mode="json", exclude_defaults=True)
    with pytest.raises(ScenarioError, match=message.replace("?", r"\?")):
        parse_scenario({**content, "market": market}, "test.yaml")


def test_prices_that_are_none_are_refused_by_name(known: Known) -> None:
    bad = [replace(known.prices[0], price_usd_per_hour=0.0)]
    with pytest.raises(MarketError, match="price must be positive"):
        resolve_scenario(spec(), replace(known, prices=[*known.prices, *bad]))


def _zones(known: Known, offer) -> set[str | None]:
    return {
        row.zone for row in known.prices
        if (row.domain, row.instance_type, row.market)
        == (offer.domain, offer.instance_type, offer.market)
    }  # fmt: skip

"""What of a pull is new, and what of it must not be used."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.market.changes import new_rows, offered
from catalog.market.pull import PRICED, PRICES, Limits, Of, Part
from catalog.market.reads import STORED

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
DOMAIN = "aws:us-east-1"
TYPES = pl.DataFrame(
    [("aws", "g6.xlarge", 1, 1), ("aws", "p5.48xlarge", 8, None), ("aws", "g5.12xlarge", 4, 2)],
    schema={
        "cloud": pl.String, "instance_type": pl.String, "gpu_count": pl.Int32,
        "stated_gpus": pl.Int32,
    },
    orient="row",
)  # fmt: skip
WHOLE = [Part(DOMAIN, of) for of in PRICED]


def price(
    usd: float | None, minutes: float | None = None, zone: str | None = "use1-az6",
    kind: str = "g6.xlarge", market: str = "spot", nodes: int | None = None,
) -> dict:  # fmt: skip
    at = None if minutes is None else NOW + timedelta(minutes=minutes)
    return {
        "observed_at": at, "cloud": "aws", "domain": DOMAIN, "zone": zone, "instance_type": kind,
        "market": market, "price_usd_per_hour": usd, "nodes": nodes, "source": "test",
    }  # fmt: skip


class Store:
    """A table that pulls are appended to, as the database does it."""

    def __init__(self) -> None:
        self.rows = pl.DataFrame(schema=STORED)

    def pull(
        self, *prices: dict, minutes: float = 0.0, parts: list[Part] | None = None,
        limits: Limits | None = None,
    ) -> pl.DataFrame:  # fmt: skip
        rows, self.rejected = new_rows(
            pl.DataFrame(list(prices), schema=PRICES), self.rows, TYPES,
            WHOLE if parts is None else parts, NOW + timedelta(minutes=minutes),
            limits or Limits(),
        )  # fmt: skip
        new = rows.select(list(STORED)).cast(STORED)
        self.rows = pl.concat([self.rows, new])
        return rows

    @property
    def now(self) -> dict[tuple, float]:
        found = offered(self.rows.with_columns(pl.col("zone").fill_null("")))
        return {
            (row["zone"], row["instance_type"], row["market"]): row["price_usd_per_hour"]
            for row in found.iter_rows(named=True)
        }


AZ6 = ("use1-az6", "g6.xlarge", "spot")


def test_only_changes_are_kept() -> None:
    store = Store()
    assert store.pull(price(0.4, -60), price(0.5, -30)).height == 2
    assert store.pull(price(0.5, -30), minutes=10).height == 0
    assert store.pull(price(0.5, -30), price(0.6, 15), minutes=20).height == 1
    assert store.now == {AZ6: 0.6}


def test_a_source_without_times_is_seen_when_it_was_asked() -> None:
    store = Store()
    first = store.pull(price(1.0, market="on_demand"))
    assert first["observed_at"].to_list() == [NOW]
    assert store.pull(price(1.0, market="on_demand"), minutes=10).height == 0
    changed = store.pull(price(1.1, market="on_demand"), minutes=20)
    assert changed["observed_at"].to_list() == [NOW + timedelta(minutes=20)]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (price(0.0, -1), "price is not positive"),
        (price(-1.0, -1), "price is not positive"),
        (price(float("nan"), -1), "price is not positive"),
        (price(None, -1), "price is not positive"),
        (price(0.4, -1, kind="g99.xlarge"), "unknown instance type"),
        (price(0.4, -1, kind="g5.12xlarge"), "the cloud says that the type has other GPUs"),
        (price(150.0, -1), "more than 100 USD per GPU and hour: another unit?"),
        (price(1.0, -1), "spot not below on-demand"),
        (price(0.99995, -1), "spot not below on-demand"),
        (price(0.4, 6), "observed in the future: a clock is off"),
    ],
)
def test_what_must_not_be_used_is_kept_with_its_reason(wrong: dict, reason: str) -> None:
    store = Store()
    rows = store.pull(wrong, price(1.0, market="on_demand"))
    assert store.rejected == {reason: 1}
    assert rows.filter(pl.col("rejected_because") == reason).height == 1
    assert AZ6 not in store.now
    again = store.pull(wrong, price(1.0, market="on_demand"), minutes=1)
    assert again.height == 0  # kept once


def test_a_rejected_price_takes_the_offer_away_and_the_old_price_brings_it_back() -> None:
    store = Store()
    on_demand = price(1.0, market="on_demand")
    store.pull(price(0.4, -60), on_demand)
    store.pull(price(1.2, 5), on_demand, minutes=10)
    assert AZ6 not in store.now
    store.pull(price(0.4, 15), on_demand, minutes=20)
    assert store.now[AZ6] == 0.4


def test_spot_is_judged_again_when_on_demand_becomes_known() -> None:
    store = Store()
    store.pull(price(1.2, -60), parts=[Part(DOMAIN, Of.SPOT)])
    assert store.now == {AZ6: 1.2}
    store.pull(price(1.2, -60), price(1.0, market="on_demand"), minutes=10)
    assert AZ6 not in store.now


def test_spot_is_compared_with_the_last_on_demand_price_where_none_came() -> None:
    store = Store()
    store.pull(price(1.0, market="on_demand"))
    store.pull(price(1.2, 5), minutes=10, parts=[Part(DOMAIN, Of.SPOT)])
    assert store.rejected == {"spot not below on-demand": 1}


def test_a_jump_is_taken_in_when_it_is_seen_again() -> None:
    store = Store()
    store.pull(price(0.1, -60))
    store.pull(price(0.9, 5), minutes=10)
    assert [reason[:4] for reason in store.rejected] == ["jump"]
    assert store.now == {AZ6: 0.1}  # the last good price stays
    store.pull(price(0.9, 5), minutes=20)  # AWS says the same, with the same time
    assert store.now == {AZ6: 0.9}
    assert store.pull(price(0.9, 5), minutes=30).height == 0


def test_an_outlier_goes_by() -> None:
    store = Store()
    store.pull(price(0.1, -60))
    store.pull(price(0.9, 5), minutes=10)
    store.pull(price(0.9, 5), price(0.11, 15), minutes=20)
    assert store.now == {AZ6: 0.11}
    store.pull(price(0.01, 25), minutes=30)  # down as well
    assert store.now == {AZ6: 0.11}


def test_duplicates_are_kept_once_and_change_nothing() -> None:
    store = Store()
    store.pull(price(0.4, -60), price(0.41, -60))
    assert store.rejected == {"duplicate": 1}
    assert store.now == {AZ6: 0.4}
    assert store.pull(price(0.4, -60), price(0.41, -60), minutes=10).height == 0


def test_what_is_no_longer_listed_is_gone_and_may_come_back() -> None:
    store = Store()
    store.pull(price(0.4, -60), price(0.5, -60, zone="use1-az1"))
    gone = store.pull(price(0.5, -60, zone="use1-az1"), minutes=10)
    assert gone["listed"].to_list() == [False]
    assert list(store.now) == [("use1-az1", "g6.xlarge", "spot")]
    store.pull(price(0.4, -60), price(0.5, -60, zone="use1-az1"), minutes=20)
    assert store.now[AZ6] == 0.4


def test_parts_that_failed_take_nothing_away() -> None:
    store = Store()
    store.pull(price(0.4, -60), price(1.0, market="on_demand"))
    store.pull(
        minutes=10, parts=[Part(DOMAIN, Of.SPOT, "throttled"), Part(DOMAIN, Of.ON_DEMAND, "x")]
    )
    assert len(store.now) == 2


def test_a_stock_that_changes_is_news() -> None:
    store = Store()
    store.pull(price(1.0, market="on_demand", nodes=3))
    assert store.pull(price(1.0, market="on_demand", nodes=2), minutes=5)["nodes"].to_list() == [2]


def test_an_offer_of_a_whole_domain_has_no_zone() -> None:
    store = Store()
    rows = store.pull(price(0.4, -60, zone=None), price(0.4, -60, zone=None))
    assert rows["zone"].to_list() == [None, None]
    assert store.rejected == {"duplicate": 1}


def test_a_slower_refresh_that_began_before_changes_nothing() -> None:
    store = Store()
    store.pull(price(1.0, market="on_demand"), minutes=0)
    store.pull(price(2.0, market="on_demand"), minutes=20)
    assert store.pull(price(1.0, market="on_demand"), minutes=10).height == 0
    assert store.now == {("use1-az6", "g6.xlarge", "on_demand"): 2.0}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.2, 0.25, 0.3, 0.4]), min_size=1, max_size=12),
    st.lists(st.integers(0, 13), min_size=1, max_size=8, unique=True),
    st.booleans(),
)
def test_however_a_history_is_cut_into_pulls_it_is_kept_whole_and_once(
    values: list[float], cuts: list[int], twice: bool
) -> None:
    """A price every ten minutes; each pull asks from the one before on, as AWS answers."""
    store, last = Store(), -60.0
    for cut in sorted(cuts):
        at = 10.0 * cut + 5.0
        since = last - 10.0
        known = [(10.0 * step, usd) for step, usd in enumerate(values) if 10.0 * step <= at]
        held = [point for point in known if point[0] <= since][-1:]
        new = [point for point in known if point[0] > since]
        answer = [price(usd, time) for time, usd in (*held, *new)]
        for minutes in (at, at + 1.0) if twice else (at,):
            store.pull(*answer, minutes=minutes)
        last = at
    seen = [usd for step, usd in enumerate(values) if 10.0 * step <= last]
    changes = [usd for usd, before in zip(seen, [None, *seen], strict=False) if usd != before]
    kept = store.rows.filter("listed").sort("observed_at")
    assert kept["price_usd_per_hour"].to_list() == changes
    assert list(store.now.values()) == changes[-1:]

"""Pulls in the database: nothing twice, nothing lost, no lock for readers, views."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import polars as pl
import pytest

from catalog import migrations
from catalog.market.pull import PRICED, PRICES, TYPES, Limits, Of, Part, Pull, QuotaRow, Score
from catalog.market.reads import (
    read_asked,
    read_feeds,
    read_launches,
    read_market,
    read_quotas,
    read_scores,
)
from catalog.market.writes import append_pull, record_launches, watch_failure
from catalog.seed import import_seed
from catalog.store import Catalog
from planner.availability import LaunchOutcome, LaunchResult
from planner.types import Market

NOW = datetime.now(UTC).replace(microsecond=0)
ZONES = ("use1-az1", "use1-az2", "use1-az4", "use1-az6")
KINDS = ("g6.xlarge", "g5.xlarge", "g6e.xlarge")
DOMAIN = "aws:us-east-1"


@pytest.fixture
def catalog(tmp_path: Path, seeded: Catalog) -> Catalog:
    """A home of its own with the shipped data."""
    found = Catalog(tmp_path)
    shutil.copy(seeded.database, found.database)
    return found


def pull(at: datetime, usd: float, parts: list[Part] | None = None, **more) -> Pull:
    """All zones and types at one price, as of `at`."""
    rows = [
        {"observed_at": at, "cloud": "aws", "domain": DOMAIN, "zone": zone, "instance_type": kind,
         "market": market, "price_usd_per_hour": usd * (1.0 if market == "spot" else 4.0),
         "nodes": None, "source": "test"}
        for zone in ZONES
        for kind in KINDS
        for market in ("spot", "on_demand")
    ]  # fmt: skip
    whole = [Part(DOMAIN, of) for of in PRICED]
    return Pull("aws", at, pl.DataFrame(rows, schema=PRICES), parts or whole, **more)


def take(catalog: Catalog, *pulls: Pull) -> list:
    landed = []
    for one in pulls:
        with catalog.write() as connection:
            landed.append(append_pull(connection, one, Limits()))
    return landed


def count(catalog: Catalog, where: str = "true") -> int:
    with catalog.read() as connection:
        return connection.execute(
            f"SELECT count(*) FROM offer WHERE feed = 'aws' AND {where}"
        ).fetchall()[0][0]


def test_prices_in_force_are_those_of_the_first_source_that_has_the_market(
    catalog: Catalog,
) -> None:
    take(catalog, pull(NOW, 0.25))
    with catalog.read() as connection:
        rows = read_market(connection, ["aws", "snapshot"])
        shipped = read_market(connection, ["snapshot"])
        other_way = read_market(connection, ["snapshot", "aws"])
    mine = [row for feed, _, row in rows if row.domain == DOMAIN]
    assert len(mine) == 2 * len(ZONES) * len(KINDS)
    assert {row.price_usd_per_hour for row in mine} == {0.25, 1.0}
    assert {feed for feed, _, row in rows if row.domain != DOMAIN} == {"snapshot"}
    assert other_way == shipped
    assert all(seen == NOW for feed, seen, _ in rows if feed == "aws")


def test_a_second_pull_of_the_same_is_no_news_but_seen(catalog: Catalog) -> None:
    later = NOW + timedelta(minutes=10)
    landed = take(catalog, pull(NOW, 0.25), pull(later, 0.25))
    assert (landed[0].changed, landed[1].changed) == (24, 0)
    assert count(catalog) == 24
    with catalog.read() as connection:
        assert {seen for feed, seen, _ in read_market(connection, ["aws"])} == {later}
        assert read_asked(connection, "aws", "spot") == {DOMAIN: later}
        spans = connection.execute("SELECT DISTINCT pulls FROM market_watch").fetchall()
    assert spans == [(2,)]


def test_a_failed_part_keeps_its_prices_and_their_age(catalog: Catalog) -> None:
    later = NOW + timedelta(minutes=10)
    failed = [Part(DOMAIN, Of.SPOT, "throttled"), Part(DOMAIN, Of.ON_DEMAND)]
    second = pull(later, 0.25, failed)
    second = Pull("aws", later, second.prices.filter(pl.col("market") == "on_demand"), failed)
    take(catalog, pull(NOW, 0.25), second)
    with catalog.read() as connection:
        rows = read_market(connection, ["aws"])
        state = read_feeds(connection, ["aws"])[0]
    seen = {row.market: at for _, at, row in rows}
    assert seen == {Market.SPOT: NOW, Market.ON_DEMAND: later}
    assert (state.offers, state.seen_at) == (24, NOW)


def test_an_empty_answer_is_no_market(catalog: Catalog) -> None:
    later = NOW + timedelta(minutes=10)
    empty = Pull("aws", later, parts=[Part(DOMAIN, of) for of in PRICED])
    landed = take(catalog, pull(NOW, 0.25), empty)
    assert [part.failed for part in landed[1].parts] == [
        "an empty answer where there were 12 offers"
    ] * 2
    assert landed[1].withdrawn == 0
    with catalog.read() as connection:
        assert len(read_market(connection, ["aws"])) == 24


def test_an_empty_file_is_meant(catalog: Catalog) -> None:
    later = NOW + timedelta(minutes=10)
    empty = Pull("aws", later, parts=[Part(DOMAIN, of, sure=True) for of in PRICED])
    landed = take(catalog, pull(NOW, 0.25), empty)
    assert landed[1].withdrawn == 24
    with catalog.read() as connection:
        assert read_market(connection, ["aws"]) == []


def test_a_source_that_does_not_answer_at_all_leaves_a_gap(catalog: Catalog) -> None:
    start = NOW - timedelta(hours=3)
    take(catalog, pull(start, 0.25))
    with catalog.write() as connection:
        for minutes in (10, 20, 30):
            watch_failure(connection, "aws", "no credentials", start + timedelta(minutes=minutes))
    take(catalog, pull(start + timedelta(hours=2), 0.3))
    with catalog.read() as connection:
        gaps = connection.execute(
            "SELECT part, gap_from, gap_to, minutes, why FROM market_gap "
            "WHERE feed = 'aws' ORDER BY part, gap_from"
        ).fetchall()
        failed = connection.execute(
            "SELECT DISTINCT pulls FROM market_watch WHERE outcome = 'failed'"
        ).fetchall()
    assert failed == [(3,)]  # one row per stretch
    closed = [gap for gap in gaps if gap[2] is not None]
    assert [(gap[0], gap[3], gap[4]) for gap in closed] == [
        ("on_demand", 120.0, "no credentials"), ("spot", 120.0, "no credentials"),
    ]  # fmt: skip
    still = [gap for gap in gaps if gap[2] is None]
    assert all(gap[4] == "not asked" and gap[3] >= 60.0 for gap in still)
    assert len(still) == 2


def test_types_that_a_source_describes_join_the_class_they_belong_to(catalog: Catalog) -> None:
    kinds = pl.DataFrame(
        [("lambda", "gpu_1x_h100", "H100", 1, 26), ("lambda", "gpu_1x_gh200", "GH200", 1, 64),
         ("aws", "g6.xlarge", "L4", 1, 4)],
        schema=TYPES, orient="row",
    )  # fmt: skip
    rows = [
        {"observed_at": None, "cloud": "lambda", "domain": "lambda:us-south-1", "zone": None,
         "instance_type": name, "market": "on_demand", "price_usd_per_hour": 2.5, "nodes": None,
         "source": "test"}
        for name in ("gpu_1x_h100", "gpu_1x_gh200")
    ]  # fmt: skip
    parts = [Part("lambda:us-south-1", Of.ON_DEMAND)]
    one = Pull("lambdalabs", NOW, pl.DataFrame(rows, schema=PRICES), parts, kinds)
    with catalog.read() as connection:
        slowest = connection.execute(
            "SELECT min(network_peak_gbit_per_s) FROM instance_type WHERE node_class = 'H100 x1'"
        ).fetchall()[0][0]
    landed = take(catalog, one)[0]
    assert landed.new_types == ["gpu_1x_h100"]
    assert landed.rejected == {"unknown instance type": 1}
    with catalog.read() as connection:
        found = connection.execute(
            "SELECT node_class, vcpus, network_peak_gbit_per_s, source FROM instance_type "
            "WHERE instance_type = 'gpu_1x_h100'"
        ).fetchall()
        assert [row.node_class for _, _, row in read_market(connection, ["lambdalabs"])] == [
            "H100 x1"
        ]
    assert found[0][:3] == ("H100 x1", 26, slowest)
    assert "link and network as of H100 x1" in found[0][3]


def test_scores_and_quotas_are_kept_when_they_change(catalog: Catalog) -> None:
    kinds = ("g5.xlarge", "g6.xlarge", "g6e.xlarge")

    def one(minutes: int, score: int, used: float) -> Pull:
        return pull(
            NOW + timedelta(minutes=minutes), 0.25, [Part(DOMAIN, of) for of in Of],
            scores=[Score(DOMAIN, kinds, ("g6.xlarge",), 8, score)],
            quotas=[QuotaRow(DOMAIN, "G and VT", "g*", "spot", 96.0, used, 0.0)],
        )  # fmt: skip

    take(catalog, one(0, 7, 8.0), one(10, 7, 8.0), one(20, 3, 12.0))
    now = NOW + timedelta(minutes=25)
    with catalog.read() as connection:
        rows = connection.execute(
            "SELECT (SELECT count(*) FROM placement_score), (SELECT count(*) FROM quota)"
        ).fetchall()
        scores = read_scores(connection, ["aws"], now, timedelta(hours=1))
        late = read_scores(connection, ["aws"], now + timedelta(hours=2), timedelta(hours=1))
        quotas = read_quotas(connection, ["aws"])
    assert rows == [(2, 2)]
    assert scores[DOMAIN, "g6.xlarge"].score == 3
    assert scores[DOMAIN, "g6.xlarge"].instance_types == kinds
    assert late == {}  # an old score is no score
    assert quotas[0].left_vcpus == 84


def test_what_became_of_a_launch_is_kept_once(catalog: Catalog) -> None:
    place = (DOMAIN, "use1-az6", "g6.xlarge", Market.SPOT)
    results = [
        LaunchResult("a", NOW, *place, LaunchOutcome.NO_CAPACITY, "InsufficientInstanceCapacity"),
        LaunchResult("b", NOW, *place, LaunchOutcome.LAUNCHED),
        LaunchResult("b", NOW + timedelta(hours=1), *place, LaunchOutcome.PREEMPTED),
    ]
    with catalog.write() as connection:
        assert record_launches(connection, results) == 3
        assert record_launches(connection, results) == 0
    with catalog.read() as connection:
        assert read_launches(connection, NOW - timedelta(minutes=1)) == results
        assert read_launches(connection, NOW + timedelta(minutes=1)) == results[2:]
        failures = connection.execute(
            "SELECT launched, no_capacity, preempted, last_failure_at FROM capacity_failure"
        ).fetchall()
    assert failures == [(1, 1, 1, NOW + timedelta(hours=1))]


def test_price_changes_say_how_much_and_how_long(catalog: Catalog) -> None:
    take(catalog, pull(NOW, 0.2), pull(NOW + timedelta(hours=2), 0.3))
    with catalog.read() as connection:
        found = connection.execute(
            "SELECT DISTINCT before_usd_per_hour, price_usd_per_hour, round(change, 6), lasted "
            "FROM price_change WHERE feed = 'aws' AND market = 'spot'"
        ).fetchall()
    assert found == [(0.2, 0.3, 0.5, timedelta(hours=2))]


def test_an_older_home_gets_the_market_and_keeps_its_prices(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    before = migrations.MIGRATIONS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("catalog.migrations.MIGRATIONS", before[:9])
        with catalog.write() as connection:
            import_seed(connection)
            old = connection.execute("FROM latest_price ORDER BY ALL").fetchall()
    with catalog.read() as connection:
        assert connection.execute("FROM latest_price ORDER BY ALL").fetchall() == old
        assert read_feeds(connection, ["snapshot"])[0].offers > 0


def test_two_refreshes_at_once_keep_nothing_twice_and_lose_nothing(catalog: Catalog) -> None:
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=_take_many, args=(str(catalog.home), NOW, 8)) for _ in range(2)]
    errors, seen, stop = [], [], threading.Event()
    catalog.publish(force=True)
    reader = threading.Thread(target=_read_on, args=(catalog, stop, seen, errors))
    reader.start()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    stop.set()
    reader.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert errors == []
    assert len(seen) > 5
    assert seen == sorted(seen)
    assert count(catalog) == 8 * 24  # every price of every pull, once
    with catalog.read() as connection:
        twice = connection.execute(
            "SELECT 1 FROM offer WHERE feed = 'aws' GROUP BY domain, zone, instance_type, market, "
            "observed_at HAVING count(*) > 1"
        ).fetchall()
    assert twice == []


def test_a_kill_in_the_middle_leaves_all_or_nothing(catalog: Catalog) -> None:
    catalog.publish(force=True)
    spawn = multiprocessing.get_context("spawn")
    for further_s in (0.0, 0.13):
        before = count(catalog)
        first = before // 24
        worker = spawn.Process(
            target=_take_many, args=(str(catalog.home), NOW, first + 200, max(0, first - 2))
        )
        worker.start()
        deadline = time.monotonic() + 60
        while count(catalog) <= before and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(further_s)
        assert worker.is_alive()
        worker.kill()
        worker.join()
        assert count(catalog) % 24 == 0
        assert count(catalog) > before
    done = count(catalog) // 24
    _take_many(str(catalog.home), NOW, done + 3, done - 2)
    assert count(catalog) == (done + 3) * 24
    with duckdb.connect(str(catalog.snapshot), read_only=True) as connection:
        assert connection.execute("SELECT count(*) FROM price_now").fetchall()[0][0] > 0


def _take_many(home: str, start: datetime, pulls: int, first: int = 0) -> None:
    catalog = Catalog(Path(home))
    for number in range(first, pulls):
        take(catalog, pull(start + timedelta(minutes=number), 0.2 + 0.001 * number))
        catalog.publish(force=number % 4 == 0)


def _read_on(catalog: Catalog, stop: threading.Event, seen: list, errors: list) -> None:
    while not stop.is_set():
        try:
            _, rows = catalog.query("SELECT count(*) FROM offer WHERE feed = 'aws'")
            seen.append(rows[0][0])
        except Exception as error:
            errors.append(error)
        time.sleep(0.01)

"""Demand from the inbox to the plan's input."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from catalog.observed import read_observed
from catalog.store import Catalog
from executor.gateway.demand import DemandBook
from planner.demand import DemandHistory, forecast_demand
from planner.errors import ScenarioError
from planner.known import Known
from planner.resolve import resolve_scenario
from planner.scenario import ScenarioSpec
from tasks.observed import InboxRead, load_inbox
from tasks.scenario_file import read_scenario

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
LATER = NOON + timedelta(hours=1)


def write_minutes(
    home: Path,
    counts: dict[str, list[int]],
    first: datetime = NOON,
    lengths: tuple[int, int] | None = None,
) -> None:
    """A gateway's file with the requests of every minute, all of some lengths."""
    now = [first.timestamp()]
    book = DemandBook(home / "inbox", lambda: now[0])
    for number in range(max(map(len, counts.values()))):
        now[0] = first.timestamp() + 60.0 * number
        for model, each in counts.items():
            for _ in range(each[number] if number < len(each) else 0):
                book.came(model)
                if lengths is not None:
                    book.ended(model, *lengths)
        book.close(counts)
    book.close(counts, at_end=True)
    book.write()


def observed(catalog: Catalog) -> dict[str, tuple[list[int], list[float]]]:
    with catalog.read() as connection:
        return read_observed(connection, NOON - timedelta(days=8))


def test_files_are_taken_in_once_and_gateways_add_up(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    assert load_inbox(catalog, LATER) == InboxRead()
    write_minutes(tmp_path, {"m": [60, 120]})
    write_minutes(tmp_path, {"m": [60], "n": [6]})
    kept = {file.name: file.read_bytes() for file in (tmp_path / "inbox").glob("*.parquet")}
    assert load_inbox(catalog, LATER) == InboxRead(files=2, rows=4)
    assert not list((tmp_path / "inbox").glob("*.parquet"))
    minute = int(NOON.timestamp()) // 60
    expected = {"m": ([minute, minute + 1], [2.0, 2.0]), "n": ([minute], [0.1])}
    assert observed(catalog) == expected
    for name, content in kept.items():  # killed after the commit, before they were removed
        (tmp_path / "inbox" / name).write_bytes(content)
    assert load_inbox(catalog, LATER) == InboxRead()
    assert not list((tmp_path / "inbox").glob("*.parquet"))
    assert observed(catalog) == expected
    with catalog.read() as connection:
        (row,) = connection.execute(
            "SELECT requests, prompt_tokens_mean FROM demand_by_minute WHERE model = 'n'"
        ).fetchall()
    assert row == (6, None)


def test_how_many_streams_met_their_objectives(tmp_path: Path) -> None:
    catalog, now = Catalog(tmp_path), NOON.timestamp()
    for _ in range(2):  # gateways
        book = DemandBook(tmp_path / "inbox", lambda: now)
        for ttft_met, tpot_met in ((True, True), (True, False), (True, True), (False, True)):
            book.judged("m", ttft_met=ttft_met, tpot_met=tpot_met)
        book.close(["m", "n"], at_end=True)
        book.write()
    first, _ = (tmp_path / "inbox").glob("*.parquet")
    older = pl.read_parquet(first).drop("judged", "ttft_met", "tpot_met", "both_met")
    older.write_parquet(tmp_path / "inbox" / "demand-of-an-earlier-version.parquet")
    assert load_inbox(catalog, LATER).files == 3
    with catalog.read() as connection:
        rows = connection.execute("SELECT * EXCLUDE minute FROM attainment_by_minute").fetchall()
    assert rows == [("m", 8, 0.5, 0.75, 0.75)]


def test_a_file_that_fails_to_commit_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog(tmp_path)
    write_minutes(tmp_path, {"m": [1]})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("tasks.observed.append_observed", killed)
        with pytest.raises(KeyboardInterrupt):
            load_inbox(catalog, LATER)
    assert observed(catalog) == {}
    assert load_inbox(catalog, LATER).files == 1


def test_broken_files_are_named_and_set_aside(tmp_path: Path) -> None:
    catalog, inbox = Catalog(tmp_path), tmp_path / "inbox"
    write_minutes(tmp_path, {"m": [1]})
    (good,) = inbox.glob("*.parquet")
    rows = pl.read_parquet(good)
    (inbox / "a.parquet").write_bytes(b"PAR1 and no more")
    rows.drop("requests").write_parquet(inbox / "b.parquet")
    rows.with_columns(requests=pl.lit(-1)).cast({"requests": pl.Int64}).write_parquet(
        inbox / "c.parquet"
    )
    rows.with_columns(requests=pl.lit("1")).write_parquet(inbox / "d.parquet")
    rows.with_columns(minute=pl.col("minute") + timedelta(seconds=1)).write_parquet(
        inbox / "e.parquet"
    )
    rows.with_columns(model=pl.lit(None, dtype=pl.String)).write_parquet(inbox / "f.parquet")
    (inbox / "g.parquet.draft").write_bytes(b"half")
    found = load_inbox(catalog, LATER)
    assert (found.files, found.rows) == (1, 1)
    for name, said in zip(found.broken, (
        "a.parquet: ", "b.parquet: no column requests", "c.parquet: a count is negative",
        "d.parquet: another kind of values in requests", "e.parquet: a minute that does not begin",
        "f.parquet: values are missing",
    ), strict=True):  # fmt: skip
        assert said in name
    assert {file.name for file in (inbox / "broken").iterdir()} == {
        f"{x}.parquet" for x in "abcdef"
    }
    assert (inbox / "g.parquet.draft").exists()
    assert load_inbox(catalog, LATER) == InboxRead()


def tiny(*demands: dict[str, Any]) -> ScenarioSpec:
    """The tiny scenario with its first workload once per demand."""
    spec = read_scenario("tiny").model_dump(exclude_unset=True)
    first = spec["workloads"][0]
    spec["workloads"] = [
        {**first, "name": f"w{number}", "demand": demand} for number, demand in enumerate(demands)
    ]
    return ScenarioSpec.model_validate(spec)


def rate_of(known: Known, **demand: Any) -> float:
    scenario = resolve_scenario(tiny({"observed": demand}), known)
    return scenario.workloads[0].demand_rps


def test_the_plan_is_for_what_gateways_saw(known: Known) -> None:
    model = read_scenario("tiny").workloads[0].model
    assert rate_of(known, at_first_rps=3.0) == 3.0
    few = replace(known, observed={model: ([1, 2], [1.0, 5.0])})
    assert rate_of(few, at_first_rps=3.0) == 5.0
    assert rate_of(few, at_first_rps=8.0) == 8.0
    minutes = [*range(100), *range(110, 200)]  # ten that no gateway saw
    rates = [4.0 + minute % 3 for minute in minutes]
    seen = replace(known, observed={model: (minutes, rates)})
    filled = DemandHistory.of_minutes("x", minutes, rates)
    assert filled.rates_rps[100:110].tolist() == [rates[99]] * 10
    spec = read_scenario("tiny")
    horizon = spec.allocation.startup_minutes + spec.operate.interval_minutes
    expected = forecast_demand(filled, horizon, 0.95).rate_rps
    assert rate_of(seen, at_first_rps=3.0) == pytest.approx(expected)
    assert rate_of(seen, at_first_rps=3.0, share=0.5) == pytest.approx(expected / 2)
    assert rate_of(seen, at_first_rps=3.0, at_least_rps=50.0) == 50.0
    quiet = replace(known, observed={model: (list(range(200)), [0.0] * 200)})
    assert rate_of(quiet, at_first_rps=3.0) == 0.0


def test_workloads_of_one_model_share_what_was_seen(known: Known) -> None:
    seen = {"observed": {"at_first_rps": 1.0}}
    with pytest.raises(ScenarioError, match=r"2 times its observed requests; .* together make 1"):
        resolve_scenario(tiny(seen, seen), known)
    half = {"observed": {"at_first_rps": 1.0, "share": 0.5}}
    assert len(resolve_scenario(tiny(half, half), known).workloads) == 2
    with pytest.raises(ValueError, match="give one of requests_per_s, trace, history and observed"):
        tiny({"observed": {"at_first_rps": 1.0}, "requests_per_s": 1.0})

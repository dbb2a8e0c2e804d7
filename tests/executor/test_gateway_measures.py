"""What the gateway measures: metrics for Prometheus, and demand by the minute."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest
from prometheus_client.parser import text_string_to_metric_families

from executor.gateway.demand import DemandBook, p95
from executor.gateway.measure import Measures
from executor.routes import Objective, Routes, write_routes
from planner.types import Phase
from tests.support.gateway import WORDS, Engine, ask, gateway, wait_for, words_of

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels, the model's left out."""
    return {
        (s.name.removeprefix("coral_gateway_"), *(v for k, v in s.labels.items() if k != "model")):
        s.value
        for family in text_string_to_metric_families(text) for s in family.samples
    }  # fmt: skip


def demand_of(home: Path) -> pl.DataFrame:
    """All that its gateways left in the inbox."""
    return pl.read_parquet(home / "inbox" / "demand-*.parquet")


def test_metrics_of_answers_streams_and_failures(tmp_path: Path) -> None:
    engine, tight = Engine(), Objective(ttft_ms=10_000.0, tpot_ms=0.001)
    pair = (engine, Phase.AGGREGATED)
    with gateway(tmp_path, pair, objective=tight) as (client, file, _):
        assert ask(client).status_code == 200
        assert ask(client, stream=True).status_code == 200
        engine.temper = "breaks"
        ask(client, stream=True)
        assert ask(client, model="org/other").status_code == 404
        write_routes(file, Routes(models=("org/m",)))
        assert wait_for(lambda: ask(client).status_code == 503)
        found = samples(client.get("/metrics").text)
    assert found["requests_total", "ok"] >= 2
    assert found["requests_total", "failed"] == 1
    assert found["requests_total", "turned_away"] >= 1
    assert found["denied_total", "model_not_found"] == 1
    assert found["ttft_seconds_count",] == 2  # the two streams
    assert found["tpot_seconds_count",] == 2
    assert 0.01 < found["tpot_seconds_sum",] / 2 < 0.2  # events are 0.02 s apart
    assert found["in_flight",] == found["waiting",] == 0
    # The stream that broke off told no usage: its two events count as two tokens.
    answered = found["requests_total", "ok"]
    assert found["prompt_tokens_total",] == 7 * answered
    assert found["output_tokens_total",] == 3 * answered + 2
    assert found["slo_judged_total",] == 2
    assert found["slo_met_total", "ttft"] == 1  # not the one that broke off
    assert found["slo_met_total", "tpot"] == found["slo_met_total", "both"] == 0
    rows = demand_of(tmp_path)
    assert rows.select("judged", "ttft_met", "tpot_met", "both_met").sum().row(0) == (2, 1, 0, 0)


def test_usage_is_asked_for_and_shown_to_those_who_asked(tmp_path: Path) -> None:
    engine = Engine()
    with gateway(tmp_path, (engine, Phase.AGGREGATED)) as (client, _, _):
        plain = ask(client, stream=True)
        assert words_of(plain) == WORDS and "usage" not in plain.text
        asked = ask(client, stream=True, stream_options={"include_usage": True})
        assert '"usage": {"prompt_tokens": 7' in asked.text
        ask(client, stream=True, stream_options={"continuous_usage_stats": False})
        assert engine.seen[2]["stream_options"] == {
            "continuous_usage_stats": False, "include_usage": True,
        }  # fmt: skip
        ask(client, stream=True, stream_options="nonsense")  # for the engine to refuse
        assert engine.seen[3]["stream_options"] == "nonsense"


def test_the_gateway_leaves_its_demand_in_the_inbox(tmp_path: Path) -> None:
    with gateway(tmp_path, (Engine(), Phase.AGGREGATED)) as (client, _, _):
        ask(client)
        ask(client, stream=True)
        ask(client, model="org/other")
    rows = demand_of(tmp_path)
    assert set(rows["model"]) == {"org/m"}
    assert rows["requests"].sum() == rows["measured"].sum() == 2
    assert (rows["prompt_tokens"].sum(), rows["output_tokens"].sum()) == (14, 6)
    assert rows["prompt_tokens_p95"].drop_nulls().to_list()[-1] == 7.0


def test_minutes_are_written_once_they_are_over(tmp_path: Path) -> None:
    now = [NOON.timestamp() + 30.0]
    book = DemandBook(tmp_path / "inbox", lambda: now[0])
    for _ in range(3):
        book.came("a")
    book.turned_away("a")
    assert not book.close(["a", "b"])
    now[0] += 30.0
    book.ended("a", 100, 10)
    assert book.close(["a", "b"])
    book.write()
    now[0] += 60.0
    book.close(["a", "b"])
    book.write()
    book.write()  # nothing to write is no file
    files = sorted((tmp_path / "inbox").iterdir())
    assert len(files) == 2
    rows = pl.concat([pl.read_parquet(file) for file in files]).sort("minute", "model")
    counts = ("requests", "turned_away", "measured", "prompt_tokens")
    assert rows.select(pl.col("minute").dt.minute(), "model", *counts).rows() == [
        (0, "a", 3, 1, 0, 0), (0, "b", 0, 0, 0, 0), (1, "a", 0, 0, 1, 100), (1, "b", 0, 0, 0, 0),
    ]  # fmt: skip
    assert rows["output_tokens_p95"].to_list() == [None, None, 10.0, None]
    now[0] += 3600.0  # asleep: who saw nothing does not say that nothing came
    book.close(["a"])
    book.write()
    newest = max((tmp_path / "inbox").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    assert pl.read_parquet(newest).height == 5


def test_an_inbox_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    now = [NOON.timestamp()]
    (tmp_path / "inbox").write_text("no folder")
    book = DemandBook(tmp_path / "inbox", lambda: now[0])
    book.came("a")
    now[0] += 60.0
    assert book.close(["a"])
    with pytest.raises(OSError, match="inbox"):
        book.write()
    assert not book.close(["a"])  # not twice a second
    (tmp_path / "inbox").unlink()
    now[0] += 60.0
    assert book.close(["a"])
    book.write()
    (file,) = (tmp_path / "inbox").iterdir()
    assert pl.read_parquet(file)["requests"].to_list() == [1, 0]


@pytest.mark.parametrize("tokens", [10**30, -1, 2.5, "3", None])
def test_a_usage_that_no_request_can_have_is_not_taken(tmp_path: Path, tokens: object) -> None:
    now = NOON.timestamp()
    book = DemandBook(tmp_path, clock=lambda: now)
    visit = Measures(book).visit("org/m")
    visit.event()
    visit.used({"prompt_tokens": 5, "completion_tokens": tokens})
    visit.end(200)
    now += 120.0
    assert book.close(["org/m"])
    book.write()
    (file,) = tmp_path.glob("*.parquet")
    found = pl.read_parquet(file)
    assert (found["requests"].sum(), found["output_tokens"].sum()) == (1, 0)


def test_p95_is_the_smallest_that_95_percent_do_not_exceed() -> None:
    assert p95([]) is None
    assert p95([5]) == 5.0
    assert p95(list(range(1, 101))) == 95.0
    assert json.dumps(p95([3, 1, 2])) == "3.0"

"""What gateways keep of each replica, minute by minute."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from executor.gateway.replicas import MOST_MINUTES, ReplicaBook, Use
from executor.routes import Route
from planner.types import Phase
from tests.support.gateway import Engine, ask, gateway

NOON = 1.8e9  # a whole minute


def route(template: str = "t", phase: Phase = Phase.AGGREGATED) -> Route:
    return Route(
        replica_id="r", model="m", phase=phase, urls=("http://a", "http://b"), template_id=template
    )


def rows(inbox: Path) -> pl.DataFrame:
    return pl.read_parquet(inbox / "replicas-*.parquet").sort("minute")


def test_integrals_are_split_at_minutes(tmp_path: Path) -> None:
    now = [NOON + 30.0]
    book = ReplicaBook(tmp_path, "g", lambda: now[0])
    meter = book.meter(route())
    first, second = Use(meter, stream=False), Use(meter, stream=True)
    now[0] += 10.0
    second.event()  # from now on it decodes
    now[0] += 40.0  # 20 s into the next minute
    first.told({"prompt_tokens": 100, "completion_tokens": 8})
    first.end()
    now[0] += 10.0
    second.end()  # without a word on its tokens
    now[0] += 60.0
    assert book.close()
    book.outbox.write()
    found = rows(tmp_path)
    assert found["in_flight_s"].to_list() == pytest.approx([60.0, 50.0])
    assert found["decoding_s"].to_list() == pytest.approx([50.0, 50.0])
    # 10 s one, 20 s two; then 20 s two, 10 s one.
    assert found["decoding_sq_s"].to_list() == pytest.approx([10 + 80, 80 + 10])
    assert found["measured"].to_list() == [0, 1]
    assert found["prompt_tokens"].to_list() == [0, 100]
    assert found["output_tokens"].to_list() == [0, 8]
    assert found["other_tokens"].to_list() == [0, 1]
    assert found["replica"].unique().to_list() == ["r"]


def test_who_slept_says_nothing_of_it_and_who_has_no_template_nothing_at_all(
    tmp_path: Path,
) -> None:
    now = [NOON]
    book = ReplicaBook(tmp_path, "g", lambda: now[0])
    Use(book.meter(route()), stream=False)
    nameless = route(template="").model_copy(update={"replica_id": "other"})
    Use(book.meter(nameless), stream=False)
    now[0] += 3600.0
    book.close(at_end=True)
    book.outbox.write()
    found = rows(tmp_path)
    assert found.height == MOST_MINUTES and set(found["replica"]) == {"r"}
    assert found["in_flight_s"].sum() == pytest.approx(60.0 * MOST_MINUTES)


def test_an_idle_replica_is_forgotten_and_counted_on_when_it_comes_back(tmp_path: Path) -> None:
    now = [NOON]
    book = ReplicaBook(tmp_path, "g", lambda: now[0])
    for _ in range(2):
        use = Use(book.meter(route()), stream=False)
        now[0] += 6.0
        use.end()
        now[0] += 120.0
        book.close()
        assert book._meters == {}
    book.outbox.write()
    assert rows(tmp_path)["in_flight_s"].to_list() == pytest.approx([6.0, 6.0])


def test_streams_are_timed_between_their_events(tmp_path: Path) -> None:
    now = [NOON]

    def clock() -> float:
        return now[0]

    (tmp_path / "a").mkdir()
    with gateway(tmp_path / "a", (Engine(), Phase.AGGREGATED), clock=clock) as (client, _, _):
        for _ in range(3):
            ask(client, stream=True)
        ask(client)
        client.post("/v1/embeddings", json={"model": "org/m", "input": "x"})  # no tokens come out
        now[0] += 60.0
    found = rows(tmp_path / "a" / "inbox")
    assert found["measured"].sum() == 4
    assert (found["prompt_tokens"].sum(), found["output_tokens"].sum()) == (28, 12)
    assert found["decode_tokens"].sum() == 6  # the first tokens are not timed, nor whole answers
    assert 0.02 < found["decode_s"].sum() / 6 < 0.2  # events are 20 ms apart; four, for two gaps

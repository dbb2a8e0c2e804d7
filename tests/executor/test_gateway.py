"""The gateway over HTTP with engines of every temper."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from executor.gateway.replicas import ReplicaBook
from executor.gateway.table import RouteTable
from executor.routes import Route, Routes, read_routes, write_routes
from planner.types import Phase
from tests.support.gateway import WORDS, Engine, ask, gateway, wait_for, words_of


def test_answers_streams_and_lists_models(tmp_path: Path) -> None:
    with gateway(tmp_path, (Engine(), Phase.AGGREGATED)) as (client, _, _):
        assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["org/m"]
        assert ask(client).json()["choices"][0]["text"] == "one two three"
        streamed = ask(client, stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert words_of(streamed) == WORDS
        assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temper", ["500", "aborts", "garbage", "no line ends"])
def test_a_failure_before_the_first_token_is_tried_elsewhere(
    tmp_path: Path, temper: str, stream: bool
) -> None:
    bad, good = Engine(temper), Engine()
    with gateway(tmp_path, (bad, Phase.AGGREGATED), (good, Phase.AGGREGATED)) as (client, _, _):
        for _ in range(4):
            response = ask(client, stream=stream)
            assert response.status_code == 200
            found = words_of(response) if stream else [response.json()["choices"][0]["text"]]
            assert " ".join(found) == "one two three"
        assert bad.seen


@pytest.mark.parametrize("temper", ["breaks", "aborts late"])
def test_a_failure_after_the_first_token_is_said_and_not_repeated(
    tmp_path: Path, temper: str
) -> None:
    bad, good = Engine(temper), Engine()
    engines = (bad, Phase.AGGREGATED), (good, Phase.AGGREGATED)
    with gateway(tmp_path, *engines, weights=(100.0, 1.0)) as (client, _, _):
        response = ask(client, stream=True)
        assert words_of(response) == WORDS[:2]
        assert '"code": "failed"' in response.text
        assert "[DONE]" not in response.text
    assert len(bad.seen) == 1
    assert not good.seen


def test_an_engine_that_failed_rests_while_another_is_there(tmp_path: Path) -> None:
    bad, good = Engine("500"), Engine()
    engines = (bad, Phase.AGGREGATED), (good, Phase.AGGREGATED)
    with gateway(tmp_path, *engines, weights=(100.0, 1.0)) as (client, _, _):
        for _ in range(5):
            assert ask(client).status_code == 200
    assert len(bad.seen) == 1


def test_a_client_that_goes_away_is_noticed_while_it_waits(tmp_path: Path) -> None:
    engine = Engine("slow")
    with gateway(tmp_path, (engine, Phase.AGGREGATED)) as (client, _, _):
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={"model": "org/m", "prompt": "x"}, timeout=0.5)
        assert wait_for(lambda: engine.left_early == 1)


def test_when_all_fail_the_client_gets_an_error(tmp_path: Path) -> None:
    with gateway(tmp_path, (Engine("500"), Phase.AGGREGATED)) as (client, _, _):
        for stream in (False, True):
            response = ask(client, stream=stream)
            assert response.status_code == 502
            assert response.json()["error"]["code"] == "failed"


def test_requests_that_are_wrong(tmp_path: Path) -> None:
    with gateway(tmp_path, (Engine("refuses"), Phase.AGGREGATED)) as (client, file, _):
        unknown = ask(client, model="org/other")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        for content, message in (
            (b"{", "is not JSON"), (b"[]", "must be a JSON object"), (b"{}", "names no model"),
        ):  # fmt: skip
            response = client.post("/v1/completions", content=content)
            assert response.status_code == 400
            assert message in response.json()["error"]["message"]
        refused = ask(client)
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "prompt too long")
        large = client.post("/v1/completions", content=b" " * (5 * 2**20))
        assert large.status_code == 413
        write_routes(file, Routes(models=("org/m",)))
        time.sleep(1.2)
        nobody = ask(client)
        assert (nobody.status_code, nobody.headers["retry-after"]) == (503, "5")


def test_shares_follow_the_weights(tmp_path: Path) -> None:
    engines = [Engine(), Engine()]
    pairs = [(engine, Phase.AGGREGATED) for engine in engines]
    with gateway(tmp_path, *pairs, weights=(3.0, 1.0)) as (client, _, _):
        for _ in range(40):
            ask(client)
    assert [len(engine.seen) for engine in engines] == [30, 10]


def test_prefill_then_decode_with_the_transfer_handed_on(tmp_path: Path) -> None:
    prefill, decode = Engine(), Engine()
    with gateway(tmp_path, (prefill, Phase.PREFILL), (decode, Phase.DECODE)) as (client, _, _):
        assert words_of(ask(client, stream=True, max_tokens=7)) == WORDS
    assert prefill.seen[0]["max_tokens"] == 1
    assert prefill.seen[0]["stream"] is False
    assert prefill.seen[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert decode.seen[0]["max_tokens"] == 7
    assert decode.seen[0]["kv_transfer_params"] == {"remote_engine_id": "p1"}


def test_clients_cannot_name_the_kv_of_a_prompt(tmp_path: Path) -> None:
    engine = Engine()
    with gateway(tmp_path, (engine, Phase.AGGREGATED)) as (client, _, _):
        assert ask(client, kv_transfer_params={"do_remote_prefill": True}).status_code == 200
    assert "kv_transfer_params" not in engine.seen[0]


def test_half_a_pair_is_not_ready(tmp_path: Path) -> None:
    with gateway(tmp_path, (Engine(), Phase.DECODE)) as (client, _, _):
        assert ask(client).status_code == 503


def test_a_client_that_goes_away_ends_its_request_at_the_engine(tmp_path: Path) -> None:
    engine = Engine("endless")
    with gateway(tmp_path, (engine, Phase.AGGREGATED)) as (client, _, _):
        body = {"model": "org/m", "prompt": "x", "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        assert wait_for(lambda: engine.left_early == 1)


def test_prefill_and_decode_of_a_request_are_in_one_domain(tmp_path: Path) -> None:
    east, west, lone = Engine(), Engine(), Engine()
    decodes = [Engine(), Engine(), Engine()]
    engines = [
        *((one, Phase.PREFILL) for one in (east, west)), *((one, Phase.DECODE) for one in decodes),
        (lone, Phase.PREFILL),
    ]  # fmt: skip
    with gateway(tmp_path, *engines, domains="ewewxy") as (client, file, _):
        for _ in range(8):
            assert ask(client).status_code == 200
        assert [len(one.seen) for one in decodes] == [4, 4, 0]  # no prefill beside the third
        assert (len(east.seen), len(west.seen), len(lone.seen)) == (4, 4, 0)
        west.temper = "500"
        for _ in range(4):
            assert ask(client).status_code == 200
        assert len(decodes[1].seen) == 4 and len(decodes[0].seen) == 8
        routes = read_routes(file).routes
        apart = tuple(r for r in routes if (r.phase, r.domain) in {(Phase.PREFILL, "e"),
                                                                 (Phase.DECODE, "w")})  # fmt: skip
        write_routes(file, Routes(models=("org/m",), routes=apart))
        assert wait_for(lambda: ask(client).status_code == 503)


def test_the_table_keeps_counts_and_survives_a_broken_file(tmp_path: Path) -> None:
    file = tmp_path / "routes.json"
    one = Route(replica_id="r", model="m", phase=Phase.AGGREGATED, urls=("http://a", "http://b"))
    table = RouteTable(file, ReplicaBook(tmp_path / "inbox", "g"))
    table.refresh()
    assert table.pick("m", Phase.AGGREGATED) is None
    write_routes(file, Routes(models=("m",), routes=(one,)))
    table.refresh()
    first = table.pick("m", Phase.AGGREGATED)
    assert first is not None
    first.in_flight = 3
    second = table.pick("m", Phase.AGGREGATED)
    assert second is not None
    assert second.url != first.url
    file.write_text("{")
    table.refresh()
    assert table.models == {"m"}
    assert {t.in_flight for t in table.targets["m", Phase.AGGREGATED]} == {0, 3}
    assert table.pick("m", Phase.AGGREGATED, {"http://a", "http://b"}) is None

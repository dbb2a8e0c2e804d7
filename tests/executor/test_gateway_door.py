"""Who gets in at the gateway, how much of it, and what happens to clients that take their time."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from executor.gateway.app import Limits
from executor.gateway.door import Door
from executor.gateway.errors import RequestError
from executor.gateway.keys import ApiKeyError, add_key, read_api_keys, revoke_key
from executor.gateway.patience import PatientProtocol
from planner.types import Phase
from tests.support.gateway import WORDS, Engine, ask, gateway, wait_for, words_of

KEYS = "gateway-keys.json"


def said(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_keys_are_asked_for_once_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / KEYS
    with gateway(tmp_path, (Engine(), Phase.AGGREGATED)) as (client, _, _):
        assert ask(client).status_code == 200
        key, old = add_key(file, "alice")
        assert wait_for(lambda: ask(client).status_code == 401)
        for path in ("/v1/models", "/metrics"):
            assert client.get(path).status_code == 401
        client.headers["Authorization"] = "Bearer coral-wrong"
        assert said(ask(client)) == (401, "invalid_api_key")
        client.headers["Authorization"] = f"Bearer {old}"
        assert ask(client).status_code == 200
        _, new = add_key(file, "alice")  # both count until the old one is revoked
        revoke_key(file, key.id)
        assert wait_for(lambda: ask(client).status_code == 401)
        client.headers["Authorization"] = f"bearer {new}"
        assert ask(client).status_code == 200
        file.write_text("{")
        time.sleep(0.6)
        assert ask(client).status_code == 200  # a broken file lets nobody else in, or out
        client.headers["Authorization"] = f"Bearer {old}"
        assert said(ask(client)) == (401, "invalid_api_key")
        assert client.get("/health").status_code == 200


def test_secrets_are_hashed_and_the_file_is_its_owners(tmp_path: Path) -> None:
    file = tmp_path / KEYS
    key, secret = add_key(file, "alice", in_flight=2, per_minute=30)
    assert secret not in file.read_text() and secret.removeprefix("coral-") not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ApiKeyError, match=rf"'nobody'; there are: {key.id} \(alice\)"):
        revoke_key(file, "nobody")
    revoke_key(file, key.id)
    found = read_api_keys(file)
    assert found is not None and found.keys == ()
    with pytest.raises(RequestError):  # the last key gone is not an open door
        Door(file).check(f"Bearer {secret}")
    file.write_text("[]")
    with pytest.raises(ApiKeyError, match="is not a file of API keys"):
        Door(file)


def test_a_key_has_its_requests_a_minute_and_in_flight(tmp_path: Path) -> None:
    now = [0.0]
    _, busy = add_key(tmp_path / KEYS, "busy", per_minute=2)
    _, wide = add_key(tmp_path / KEYS, "wide", in_flight=2)
    door = Door(tmp_path / KEYS, lambda: now[0])

    def enter(secret: str) -> None:
        with door.entered(f"Bearer {secret}"):
            pass

    enter(busy)
    enter(busy)
    now[0] = 10.0  # a third of a request has grown again
    with pytest.raises(RequestError) as refused:
        enter(busy)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 20)
    now[0] = 30.0
    enter(busy)
    with door.entered(f"Bearer {wide}"), door.entered(f"Bearer {wide}"):
        with pytest.raises(RequestError, match="2 requests in flight"):
            enter(wide)
        with pytest.raises(RequestError, match="2 requests a minute"):
            enter(busy)  # keys do not share
    enter(wide)


def test_full_engines_are_429_and_a_stream_that_ends_makes_room(tmp_path: Path) -> None:
    engine, limits = Engine("endless"), Limits(in_flight=1)
    with gateway(tmp_path, (engine, Phase.AGGREGATED), limits=limits) as (client, _, _):
        body = {"model": "org/m", "prompt": "x", "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # kept: a stream that nobody holds is closed
            next(lines)
            refused = ask(client)
            assert said(refused) == (429, "engines_full")
            assert refused.headers["retry-after"] == "5"
        engine.temper = ""
        assert wait_for(lambda: ask(client).status_code == 200)


def test_a_pair_with_a_full_half_is_429(tmp_path: Path) -> None:
    prefill, limits = Engine("slow"), Limits(in_flight=1)
    engines = (prefill, Phase.PREFILL), (Engine(), Phase.DECODE)
    with gateway(tmp_path, *engines, limits=limits) as (client, _, _):
        first = threading.Thread(target=lambda: _impatient(client))
        first.start()
        assert wait_for(lambda: len(prefill.seen) == 1)
        assert said(ask(client)) == (429, "engines_full")
        first.join()


def _impatient(client: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json={"model": "org/m", "prompt": "x"}, timeout=0.5)


def test_past_the_deadline_engine_and_client_are_let_go(tmp_path: Path) -> None:
    engine, limits = Engine("slow"), Limits(deadline_s=0.4)
    with gateway(tmp_path, (engine, Phase.AGGREGATED), limits=limits) as (client, _, _):
        for stream in (False, True):
            assert said(ask(client, stream=stream)) == (504, "deadline")
        assert wait_for(lambda: engine.left_early == 2)
        engine.temper = "endless"
        late = ask(client, stream=True)
        assert words_of(late)[:3] == WORDS
        assert '"code": "deadline"' in late.text and "[DONE]" not in late.text
        assert wait_for(lambda: engine.left_early == 3)


def test_a_body_that_comes_too_slowly_is_408(tmp_path: Path) -> None:
    limits = Limits(body_s=0.2)
    with gateway(tmp_path, (Engine(), Phase.AGGREGATED), limits=limits) as (client, _, _):
        url = client.base_url
        with socket.create_connection((url.host, url.port or 80), timeout=5) as slow:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
            slow.sendall(head.encode())
            assert b" 408 " in slow.recv(4096)


def test_headers_that_do_not_come_end_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PatientProtocol, "headers_s", 0.2)
    with gateway(tmp_path, (Engine(), Phase.AGGREGATED)) as (client, _, _):
        at = (client.base_url.host, client.base_url.port or 80)
        with socket.create_connection(at, timeout=5) as silent:
            assert silent.recv(1) == b""
        with socket.create_connection(at, timeout=5) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in slow.recv(4096)
            slow.sendall(b"GET /health HTTP/1.1\r\nX-A: ")  # its next request never gets on
            found = slow.recv(4096)
            while found:
                found = slow.recv(4096)
        endless = ask(client, stream=True)  # 0.06 s of events: no request that has begun is cut
        assert words_of(endless) == WORDS


def test_headers_without_end_close_the_connection(tmp_path: Path) -> None:
    with gateway(tmp_path, (Engine(), Phase.AGGREGATED)) as (client, _, _):
        at = (client.base_url.host, client.base_url.port or 80)
        with socket.create_connection(at, timeout=5) as flood:
            flood.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
            with pytest.raises(OSError, match=r"reset|pipe|closed"):
                for number in range(2000):  # some 200 KB
                    flood.sendall(f"X-{number}: {'a' * 100}\r\n".encode())
                    time.sleep(0.0005)
                raise TimeoutError("it takes all of them")
        large = b"X-Large: " + b"a" * 60_000
        with socket.create_connection(at, timeout=5) as bearable:
            bearable.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + large + b"\r\n\r\n")
            assert b" 200 " in bearable.recv(4096)


def test_embeddings_pass_through_and_need_a_whole_engine(tmp_path: Path) -> None:
    engines = [(Engine(), phase) for phase in (Phase.AGGREGATED, Phase.PREFILL, Phase.DECODE)]
    body = {"model": "org/m", "input": "hello", "dimensions": 1}
    with gateway(tmp_path, *engines) as (client, _, _):
        for _ in range(3):
            found = client.post("/v1/embeddings", json=body)
            assert found.json()["data"] == [{"embedding": [0.5]}]
    assert [len(engine.seen) for engine, _ in engines] == [3, 0, 0]
    assert engines[0][0].seen[0] == body


def test_bodies_that_are_not_for_engines(tmp_path: Path) -> None:
    engine = Engine()
    with gateway(tmp_path, (engine, Phase.AGGREGATED)) as (client, _, _):
        deep = client.post("/v1/completions", content=b"[" * 100_000)
        assert said(deep) == (400, "malformed")
        assert ask(client, kv_transfer_params={"do_remote_prefill": True}).status_code == 200
        assert "kv_transfer_params" not in engine.seen[0]
        assert client.get("/v1/completions").status_code == 405


def test_nothing_of_a_request_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = "sesame-4711"
    caplog.set_level(logging.DEBUG)
    engine = Engine()
    with gateway(tmp_path, (engine, Phase.AGGREGATED)) as (client, _, _):
        for engine.temper in ("", "500", "garbage", "breaks", "refuses"):
            for stream in (False, True):
                ask(client, prompt=secret, stream=stream)
            client.post("/v1/completions", content=json.dumps({"prompt": secret})[:-1].encode())
    assert secret not in caplog.text


def test_a_loop_serves_many_at_once_and_lets_go_of_all(tmp_path: Path) -> None:
    """Streams cut off at random leave no request counted anywhere."""

    async def cut(client: httpx.AsyncClient, number: int) -> None:
        body = {"model": "org/m", "prompt": "x", "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                await asyncio.sleep(0.002 * number)
                break

    async def many(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            await asyncio.gather(*(cut(client, number) for number in range(20)))

    engine = Engine("endless")
    with gateway(tmp_path, (engine, Phase.AGGREGATED)) as (client, _, _):
        asyncio.run(many(str(client.base_url)))
        assert wait_for(lambda: engine.left_early == 20)
        flight = 'coral_gateway_in_flight{model="org/m"} 0.0'
        assert wait_for(lambda: flight in client.get("/metrics").text)
        assert 'coral_gateway_waiting{model="org/m"} 0.0' in client.get("/metrics").text
        gone = 'requests_total{model="org/m",outcome="gone"} 20.0'
        assert gone in client.get("/metrics").text

"""OpenAI's own Python client, unchanged, against the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as Path_

from executor.gateway.app import make_app
from executor.gateway.keys import add_key
from executor.home import HomeFiles
from executor.routes import Route, Routes, write_routes
from planner.types import Phase
from tests.support.gateway import served

WORDS = ["Fish", " swim", "."]
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def engine() -> Starlette:
    """Answers as vLLM does."""

    async def chat(request: Request) -> Response:
        body = await request.json()
        if body["messages"][0]["content"] == "too long":
            error = {"message": "maximum context length", "type": "BadRequestError", "code": 400}
            return JSONResponse({"error": error}, 400)
        if body.get("stream"):
            return StreamingResponse(chunks(body), media_type="text/event-stream")
        message = {"role": "assistant", "content": "".join(WORDS)}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return JSONResponse(answer("chat.completion", choices=[choice], usage=USAGE))

    async def embed(request: Request) -> Response:
        inputs = (await request.json())["input"]
        data = [
            {"object": "embedding", "index": n, "embedding": [0.25, float(n)]}
            for n in range(len(inputs))
        ]
        return JSONResponse({"object": "list", "model": "org/m", "data": data, "usage": USAGE})

    return Starlette(routes=[
        Path_("/v1/chat/completions", chat, methods=["POST"]),
        Path_("/v1/embeddings", embed, methods=["POST"]),
    ])  # fmt: skip


def answer(kind: str, **more: object) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "org/m", **more}


async def chunks(body: dict[str, Any]) -> AsyncIterator[str]:
    def event(**more: object) -> str:
        return f"data: {json.dumps(answer('chat.completion.chunk', **more))}\n\n"

    yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    for word in WORDS:
        yield event(choices=[{"index": 0, "delta": {"content": word}, "finish_reason": None}])
        await asyncio.sleep(0.3 if body["messages"][0]["content"] == "slowly" else 0.01)
    yield event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event(choices=[], usage=USAGE)
    yield "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The gateway's address, and a key."""
    home = tmp_path_factory.mktemp("home")
    _, secret = add_key(HomeFiles(home).gateway_keys, "client")
    with ExitStack() as stack:
        url = stack.enter_context(served(engine()))
        route = Route(replica_id="r", model="org/m", phase=Phase.AGGREGATED, urls=(url,))
        models = ("org/idle", "org/m")
        write_routes(HomeFiles(home).routes, Routes(models=models, routes=(route,)))
        yield stack.enter_context(served(make_app(home))), secret


@pytest.fixture
def client(site: tuple[str, str]) -> Iterator[openai.OpenAI]:
    url, secret = site
    with openai.OpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0) as found:
        yield found


ASKED: Any = [{"role": "user", "content": "What do fish do?"}]


def test_models_answers_and_embeddings(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["org/idle", "org/m"]
    found = client.chat.completions.create(model="org/m", messages=ASKED, max_tokens=3)
    assert found.choices[0].message.content == "Fish swim."
    assert found.usage is not None and found.usage.total_tokens == 8
    embedded = client.embeddings.create(model="org/m", input=["a", "b"], encoding_format="float")
    assert [one.embedding for one in embedded.data] == [[0.25, 0.0], [0.25, 1.0]]


def test_streams_with_and_without_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="org/m", messages=ASKED, stream=True)
    found = list(stream)
    assert [c.choices[0].delta.content for c in found if c.choices[0].delta.content] == WORDS
    assert all(chunk.usage is None for chunk in found)
    with client.chat.completions.create(
        model="org/m", messages=ASKED, stream=True, stream_options={"include_usage": True}
    ) as counted:
        last = list(counted)[-1]
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 3
    with client.chat.completions.create(model="org/m", messages=ASKED, stream=True) as left:
        next(iter(left))  # and away


def test_the_asynchronous_client_streams_too(site: tuple[str, str]) -> None:
    url, secret = site

    async def words() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=secret) as client:
            stream = await client.chat.completions.create(
                model="org/m", messages=ASKED, stream=True
            )
            return [chunk.choices[0].delta.content async for chunk in stream]

    assert [word for word in asyncio.run(words()) if word] == WORDS


def test_errors_are_the_clients_own(client: openai.OpenAI, site: tuple[str, str]) -> None:
    def ask(asking: openai.OpenAI, model: str = "org/m", text: str = "x") -> None:
        asking.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])

    with pytest.raises(openai.NotFoundError, match="does not exist here") as unknown:
        ask(client, "org/other")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(client, text="too long")
    with pytest.raises(openai.InternalServerError, match="No replica") as idle:
        ask(client, "org/idle")
    assert idle.value.status_code == 503
    stranger = openai.OpenAI(base_url=f"{site[0]}/v1", api_key="coral-no", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        ask(stranger)


def test_the_client_waits_as_it_is_told_and_tries_again(
    site: tuple[str, str], tmp_path: Path
) -> None:
    """A key of one request at a time: the client's own retry gets through."""
    slowly: Any = [{"role": "user", "content": "slowly"}]
    with ExitStack() as stack:
        url = stack.enter_context(served(engine()))
        route = Route(replica_id="r", model="org/m", phase=Phase.AGGREGATED, urls=(url,))
        write_routes(HomeFiles(tmp_path).routes, Routes(models=("org/m",), routes=(route,)))
        _, secret = add_key(HomeFiles(tmp_path).gateway_keys, "one", in_flight=1)
        base = stack.enter_context(served(make_app(tmp_path)))
        client = stack.enter_context(openai.OpenAI(base_url=f"{base}/v1", api_key=secret))
        held = client.chat.completions.create(model="org/m", messages=slowly, stream=True)
        with pytest.raises(openai.RateLimitError) as refused:
            client.with_options(max_retries=0).chat.completions.create(
                model="org/m", messages=ASKED
            )
        assert refused.value.response.headers["retry-after"] == "1"
        found = client.chat.completions.create(model="org/m", messages=ASKED)  # after a second
        assert found.choices[0].message.content == "Fish swim."
        held.close()

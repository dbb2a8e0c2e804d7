"""The gateway's web application (ASGI)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from executor.gateway.errors import RequestError, malformed, not_ready, unknown_model
from executor.gateway.serve import Server
from executor.gateway.table import RouteTable
from planner.errors import InputError

Result = TypeVar("Result")
log = logging.getLogger(__name__)

REFRESH_S = 0.5
GONE_EVERY_S = 0.5  # how often a waiting client is looked for
CONNECT_S = 2.0
READ_S = 300.0  # between two chunks of an engine's answer
LARGEST_BODY_BYTES = 4 * 2**20


class PortTakenError(InputError):
    """A port that something listens on already."""


def make_app(routes: Path, started_at: float | None = None) -> Starlette:
    """The application over a route file; it reads the file twice a second."""
    table, created = RouteTable(routes), int(started_at or time.time())
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    client = httpx.AsyncClient(
        timeout=httpx.Timeout(READ_S, connect=CONNECT_S, pool=None), limits=limits, trust_env=False
    )
    server = Server(table, client)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        table.refresh()
        task = asyncio.create_task(_keep_fresh(table))
        yield
        task.cancel()
        await client.aclose()

    async def models(_: Request) -> Response:
        data = [
            {"id": name, "object": "model", "created": created, "owned_by": "coral"}
            for name in sorted(table.models)
        ]
        return JSONResponse({"object": "list", "data": data})

    async def complete(request: Request) -> Response:
        try:
            body = await _body(request)
            model = body["model"]
            if model not in table.models:
                raise unknown_model(model)
            if not any(table.phases(model)):
                raise not_ready(model)
            if body.get("stream"):
                return await _streaming(request, server.stream(request.url.path, body))
            answer = server.answer(request.url.path, body)
            return JSONResponse(await _while_there(request, answer))
        except RequestError as error:
            return error.response()

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/health", health),
        ],
        lifespan=lifespan,
    )


async def _keep_fresh(table: RouteTable) -> None:
    while True:
        await asyncio.sleep(REFRESH_S)
        try:
            table.refresh()
        except Exception:
            log.exception("the route file can't be read; the routes known stay")


async def _while_there(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result; when the client goes away the work is cancelled, and the engine's too.

    Raises RequestError: nobody waits any more.
    """
    task = asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=GONE_EVERY_S)
            if done:
                return task.result()
            if await request.is_disconnected():
                raise RequestError(499, "The client went away.", "invalid_request_error")
    finally:
        task.cancel()


async def _body(request: Request) -> dict[str, Any]:
    """The request's JSON object, with a model's name in it."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > LARGEST_BODY_BYTES:
            raise RequestError(413, "The request is too large.", "invalid_request_error")
    try:
        body = json.loads(data)
    except ValueError as error:
        raise malformed(f"The request is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise malformed("The request must be a JSON object.")
    if not isinstance(body.get("model"), str):
        raise malformed("The request names no model.")
    body.pop("kv_transfer_params", None)  # would name the KV of another's prompt
    return body


async def _streaming(request: Request, lines: AsyncIterator[str]) -> Response:
    """An event stream once the engine has begun; an error answer where it never does.

    When the client goes away the iterator is closed, and with it the connection to the engine,
    which then stops working on the request.
    """
    first = await _while_there(request, _first(lines))

    async def events() -> AsyncIterator[str]:
        async with contextlib.aclosing(lines) as rest:  # type: ignore[type-var]
            yield first
            async for line in rest:
                yield line

    return StreamingResponse(events(), media_type="text/event-stream")


async def _first(lines: AsyncIterator[str]) -> str:
    return await anext(lines)

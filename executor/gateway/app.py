"""The gateway's web application (ASGI)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from executor.gateway.errors import RequestError, malformed, not_ready, unknown_model
from executor.gateway.serve import Server
from executor.gateway.table import RouteTable

REFRESH_S = 0.5
CONNECT_S = 2.0
READ_S = 300.0  # between two chunks of an engine's answer
LARGEST_BODY_BYTES = 4 * 2**20


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
                return await _streaming(server.stream(request.url.path, body))
            return JSONResponse(await server.answer(request.url.path, body))
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
        table.refresh()


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
    return body


async def _streaming(lines: AsyncIterator[str]) -> Response:
    """An event stream once the engine has begun; an error answer where it never does.

    When the client goes away the iterator is closed, and with it the connection to the engine,
    which then stops working on the request.
    """
    first = await anext(lines)

    async def events() -> AsyncIterator[str]:
        async with contextlib.aclosing(lines) as rest:  # type: ignore[type-var]
            yield first
            async for line in rest:
                yield line

    return StreamingResponse(events(), media_type="text/event-stream")

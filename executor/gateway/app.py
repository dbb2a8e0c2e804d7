"""The gateway's web application (ASGI)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from executor.gateway.demand import DemandBook
from executor.gateway.door import Door
from executor.gateway.errors import (
    RequestError,
    gone,
    late,
    malformed,
    too_large,
    too_slow,
    unknown_model,
)
from executor.gateway.measure import GONE, Measures, Visit
from executor.gateway.push import Subscription
from executor.gateway.replicas import ReplicaBook
from executor.gateway.serve import EMBEDDINGS, Server
from executor.gateway.table import MOST_IN_FLIGHT, RouteTable
from executor.gateway.upstream import Upstream
from executor.home import HomeFiles
from planner.errors import InputError

Result = TypeVar("Result")
log = logging.getLogger(__name__)

REFRESH_S = 0.5
GONE_EVERY_S = 0.5  # how often a waiting client is looked for
LAST_WORD_S = 5.0  # after the deadline, for a client that takes what it has slowly


class PortTakenError(InputError):
    """A port that something listens on already."""


class CertificateError(InputError):
    """Files that are no certificate and its key."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What no request goes beyond."""

    deadline_s: float = 3600.0  # from its body to its end
    body_s: float = 30.0  # until its body has come
    body_bytes: int = 4 * 2**20
    in_flight: int = MOST_IN_FLIGHT  # of every engine


def make_app(
    home: Path,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.time,
    controller: str | None = None,
) -> Starlette:
    """The application over a home: routes come from its controller, keys from its file.

    `clock` counts seconds since 1970; `controller` is where it is, if not where the home says. The
    application's `state.desk` is its Desk.
    Raises ApiKeyError: the home's key file is not one.
    """
    files, limits, created = HomeFiles(home), limits or Limits(), int(clock())
    demand = DemandBook(files.inbox, clock)
    replicas = ReplicaBook(files.inbox, demand.gateway, clock)
    table, door = RouteTable(files.routes, replicas, limits.in_flight), Door(files.gateway_keys)
    measures, upstream = Measures(demand), Upstream()
    ear = Subscription(files, demand.gateway, table, door, controller)
    desk = Desk(table, door, measures, Server(table, upstream), limits, ear)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        desk.refresh()
        tasks = [asyncio.create_task(work) for work in (_keep_fresh(desk), ear.run())]
        async with upstream:
            yield
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await desk.write_minutes(at_end=True)

    async def models(request: Request) -> Response:
        data = [
            {"id": name, "object": "model", "created": created, "owned_by": "coral"}
            for name in sorted(table.models)
        ]
        return desk.shown(request, JSONResponse({"object": "list", "data": data}))

    async def metrics(request: Request) -> Response:
        text = Response(measures.exposition(), media_type="text/plain; version=0.0.4")
        return desk.shown(request, text)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        trouble = desk.why_not_ready
        return JSONResponse({"status": trouble or "ready"}, 503 if trouble else 200)

    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", desk.complete, methods=["POST"]),
            Route("/v1/completions", desk.complete, methods=["POST"]),
            Route(EMBEDDINGS, desk.complete, methods=["POST"]),
            Route("/metrics", metrics),
            Route("/health", health),
            Route("/ready", ready),
        ],
        lifespan=lifespan,
    )
    app.state.desk = desk
    return app


@dataclass
class Desk:
    """Takes requests in and sees them to their end."""

    table: RouteTable
    door: Door
    measures: Measures
    server: Server
    limits: Limits
    ear: Subscription
    is_leaving: bool = False  # balancers are to send no more; who does is answered

    @property
    def why_not_ready(self) -> str | None:
        """What keeps a balancer from sending requests here."""
        if self.is_leaving:
            return "leaving"
        return None if self.table.models else "no routes yet"

    def shown(self, request: Request, response: Response) -> Response:
        """What only those with a key may see."""
        try:
            self.door.check(request.headers.get("authorization"))
        except RequestError as error:
            return self._denied(error)
        return response

    async def complete(self, request: Request) -> Response:
        """An answer, or an event stream once the engine has begun."""
        with contextlib.ExitStack() as stay:
            try:
                stay.enter_context(self.door.entered(request.headers.get("authorization")))
                body = await _body(request, self.limits)
                if body["model"] not in self.table.models:
                    raise unknown_model(body["model"])
            except RequestError as error:
                return self._denied(error)
            visit = self.measures.visit(body["model"])
            stay.callback(visit.end, 500)  # where nothing below has said how it ended
            try:
                return await self._answered(request, body, visit, stay)
            except RequestError as error:
                visit.end(error.status)
                return error.response()

    async def _answered(
        self, request: Request, body: dict[str, Any], visit: Visit, stay: contextlib.ExitStack
    ) -> Response:
        try:
            return await self._in_time(request, body, visit, stay)
        except TimeoutError as error:
            raise late(self.limits.deadline_s) from error

    async def _in_time(
        self, request: Request, body: dict[str, Any], visit: Visit, stay: contextlib.ExitStack
    ) -> Response:
        path = request.url.path
        ends = asyncio.get_running_loop().time() + self.limits.deadline_s
        async with asyncio.timeout_at(ends):
            if not body.get("stream") or path == EMBEDDINGS:
                answer = self.server.answer(path, body, visit)
                response = JSONResponse(await _while_there(request, answer))
                visit.end(response.status_code)
                return response
            lines = self.server.stream(path, body, visit)
            first = await _while_there(request, _next(lines))
        return EventStream(lines, first, visit, (ends, self.limits.deadline_s), stay.pop_all())

    def _denied(self, error: RequestError) -> Response:
        self.measures.denied.labels(error.code).inc()
        return error.response()

    def refresh(self) -> None:
        """Routes, where no controller pushes them, and keys as they are now."""
        if not self.ear.is_heard:
            self.table.refresh()
        self.door.refresh()
        self.measures.objectives = self.table.objectives

    async def write_minutes(self, *, at_end: bool = False) -> None:
        """Minutes that are over, into the inbox."""
        book, replicas = self.measures.book, self.table.book
        due = [
            one.outbox
            for one, is_due in (
                (book, book.close(self.table.models, at_end=at_end)),
                (replicas, replicas.close(at_end=at_end)),
            )
            if is_due
        ]
        for outbox in due:
            try:
                await asyncio.to_thread(outbox.write)
            except OSError as error:
                log.error(
                    "minutes of %s can't be written to %s (%s); they are kept",
                    outbox.kind, outbox.inbox, error,
                )  # fmt: skip


class EventStream(StreamingResponse):
    """A stream that has begun; however it ends, engine, key and counts are let go.

    When the client goes away the lines are closed, and with them the connection to the engine,
    which then stops working on the request.
    """

    def __init__(
        self,
        lines: AsyncGenerator[bytes],
        first: bytes,
        visit: Visit,
        deadline: tuple[float, float],  # the loop's time; seconds that it was
        stay: contextlib.ExitStack,
    ) -> None:
        super().__init__(self._events(first), media_type="text/event-stream")
        self.lines, self.visit, self.stay = lines, visit, stay
        self.ends, self.deadline_s = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self.ends):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            self.visit.end(504)
            event = late(self.deadline_s).event()
            with contextlib.suppress(TimeoutError):  # of a client that reads no more
                async with asyncio.timeout(LAST_WORD_S):
                    await send({"type": "http.response.body", "body": event, "more_body": False})
        finally:
            self.visit.end(GONE)
            with self.stay:
                await self.lines.aclose()

    async def _events(self, first: bytes) -> AsyncIterator[bytes]:
        yield first
        async for line in self.lines:
            yield line


async def _keep_fresh(desk: Desk) -> None:
    while True:
        await asyncio.sleep(REFRESH_S)
        try:
            desk.refresh()
        except Exception:
            log.exception("routes or keys can't be read; those known stay")
        try:
            await desk.write_minutes()
        except Exception:
            log.exception("minutes can't be written; the gateway goes on")


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
                raise gone()
    finally:
        task.cancel()


async def _next(lines: AsyncIterator[bytes]) -> bytes:
    return await anext(lines)


async def _body(request: Request, limits: Limits) -> dict[str, Any]:
    """The request's JSON object, with a model's name in it."""
    data = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for chunk in request.stream():
                data += chunk
                if len(data) > limits.body_bytes:
                    raise too_large(limits.body_bytes)
    except TimeoutError as error:
        raise too_slow(limits.body_s) from error
    except ClientDisconnect as error:
        raise gone() from error
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise malformed(f"The request is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise malformed("The request must be a JSON object.")
    if not isinstance(body.get("model"), str):
        raise malformed("The request names no model.")
    body.pop("kv_transfer_params", None)  # would name the KV of another's prompt
    return body

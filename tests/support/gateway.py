"""Engines of every temper, a gateway before them, and servers in threads."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as Path_

from executor.gateway.app import Limits, make_app
from executor.gateway.patience import PatientProtocol
from executor.routes import Objective, Route, Routes, write_routes
from planner.types import Phase

WORDS = ["one", "two", "three"]
USAGE = {"prompt_tokens": 7, "completion_tokens": 3}


@contextmanager
def served(app: Starlette, **options: Any) -> Iterator[str]:
    """A server in a thread, with uvicorn's options."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, log_level="error", timeout_graceful_shutdown=1, http=PatientProtocol, **options
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    scheme = "https" if options else "http"
    yield f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@dataclass
class Engine:
    """Answers with WORDS; `temper` says how it misbehaves."""

    temper: str = ""
    seen: list[dict[str, Any]] = field(default_factory=list)
    left_early: int = 0
    gap_s: float = 0.02  # between events

    def app(self) -> Starlette:
        return Starlette(routes=[
            Path_("/v1/chat/completions", self.complete, methods=["POST"]),
            Path_("/v1/completions", self.complete, methods=["POST"]),
            Path_("/v1/embeddings", self.embed, methods=["POST"]),
        ])  # fmt: skip

    async def embed(self, request: Request) -> Response:
        self.seen.append(await request.json())
        return JSONResponse({"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 2}})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        if self.temper == "slow":
            try:
                for _ in range(100):
                    await asyncio.sleep(0.1)
                    if await request.is_disconnected():
                        raise asyncio.CancelledError
            except asyncio.CancelledError:
                self.left_early += 1
                raise
        if self.temper == "500":
            return JSONResponse({"error": {"message": "broken"}}, 500)
        if self.temper == "refuses":
            return JSONResponse({"error": {"message": "prompt too long"}}, 400)
        if self.temper == "no line ends":
            return StreamingResponse(iter([b"data: " + b"x" * 2**20] * 10))
        if self.temper == "garbage":
            return Response("<html>", media_type="text/html")
        if body.get("stream"):
            asked = (body.get("stream_options") or {}).get("include_usage")
            return StreamingResponse(self.events(asked), media_type="text/event-stream")
        reason = "abort" if self.temper == "aborts" else "stop"
        transfer = {"remote_engine_id": "p1"} if "kv_transfer_params" in body else None
        choices = [{"text": " ".join(WORDS), "finish_reason": reason}]
        return JSONResponse({"choices": choices, "kv_transfer_params": transfer, "usage": USAGE})

    async def events(self, usage: bool) -> AsyncIterator[str]:
        try:
            if self.temper == "aborts":
                yield event("", "abort")
                yield "data: [DONE]\n\n"
                return
            for number, word in enumerate(WORDS * (100 if self.temper == "endless" else 1)):
                if self.temper == "breaks" and number == 2:
                    raise RuntimeError("broken")
                if self.temper == "aborts late" and number == 2:
                    yield event("", "abort")
                    return
                yield event(word)
                await asyncio.sleep(self.gap_s)
            yield event("", "stop")
            if usage:
                yield f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\n"
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left_early += 1
            raise


def event(text: str, reason: str | None = None) -> str:
    choice = {"text": text, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


@contextmanager
def gateway(
    tmp_path: Path,
    *engines: tuple[Engine, Phase],
    weights: tuple[float, ...] = (),
    domains: str = "",
    limits: Limits | None = None,
    objective: Objective | None = None,
    clock: Callable[[], float] = time.time,
) -> Iterator[tuple[httpx.Client, Path, list[str]]]:
    with ExitStack() as stack:
        urls = [stack.enter_context(served(engine.app())) for engine, _ in engines]
        routes = [
            Route(
                replica_id=f"r{n}", model="org/m", phase=phase, urls=(url,), template_id=f"t{n}",
                weight=weights[n] if weights else 1.0, domain=domains[n] if domains else "",
            )
            for n, ((_, phase), url) in enumerate(zip(engines, urls, strict=True))
        ]  # fmt: skip
        file = tmp_path / "routes.json"
        write_routes(file, Routes(
            models=("org/m",), routes=tuple(routes),
            objectives={"org/m": objective} if objective else {},
        ))  # fmt: skip
        base = stack.enter_context(served(make_app(tmp_path, limits, clock)))
        yield stack.enter_context(httpx.Client(base_url=base, timeout=20)), file, urls


def ask(client: httpx.Client, **changes: Any) -> httpx.Response:
    body = {"model": "org/m", "prompt": "hello", **changes}
    return client.post("/v1/completions", json=body)


def words_of(response: httpx.Response) -> list[str]:
    lines = [x for x in response.text.splitlines() if x.startswith("data:")]
    found = [json.loads(x[5:]) for x in lines if x != "data: [DONE]"]
    return [e["choices"][0]["text"] for e in found if "choices" in e and e["choices"][0]["text"]]


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not condition():
        time.sleep(0.05)
    return condition()

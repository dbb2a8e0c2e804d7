"""Requests to a gateway, streamed, so many at a time, and what they saw."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import httpx

from executor.gateway.demand import p95
from planner.types import Lengths
from tasks.progress import report

LONG_SHARE = 0.06  # of requests that have the p95 length: the 95th percentile is one of them
REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send."""

    model: str
    prompt: tuple[int, ...]  # token ids
    output_tokens: int

    def body(self) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": list(self.prompt),
            "max_tokens": self.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(slots=True)
class Seen:
    """What one request saw; times in seconds."""

    model: str
    sent_at: float
    first_at: float | None = None
    last_at: float | None = None
    tokens: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and self.tokens > 0

    @property
    def ttft_ms(self) -> float:
        return 1e3 * ((self.first_at or 0.0) - self.sent_at)

    @property
    def tpot_ms(self) -> float:
        """Time per token after the first."""
        return 1e3 * ((self.last_at or 0.0) - (self.first_at or 0.0)) / max(1, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Of all requests to one model."""

    model: str
    requests: int
    failed: int
    seconds: float  # from the first request sent to the last token
    output_tokens_per_s: float
    ttft_mean_ms: float
    ttft_p95_ms: float
    tpot_mean_ms: float
    tpot_p95_ms: float
    errors: tuple[str, ...] = field(default=())  # the first few


def make_requests(
    model: str, lengths: Lengths, vocabulary: int, count: int, seed: int = 0
) -> list[LoadRequest]:
    """Prompts of random tokens, with the mean and the p95 of the lengths."""
    draw = random.Random(seed)
    prompts = _lengths(lengths.mean_input, lengths.p95_input, count, draw)
    outputs = _lengths(lengths.mean_output, lengths.p95_output, count, draw)
    return [
        LoadRequest(model, tuple(draw.randrange(1, vocabulary) for _ in range(size)), output)
        for size, output in zip(prompts, outputs, strict=True)
    ]


def send(url: str, requests: Sequence[LoadRequest], concurrency: int) -> list[Seen]:
    """Send all, each worker the next one when its last is answered."""
    return asyncio.run(_send(url, requests, concurrency))


def send_at(url: str, requests: Sequence[LoadRequest], arrival_s: Sequence[float]) -> list[Seen]:
    """Send each at its time from now, whatever became of those before; in the order given."""
    return asyncio.run(_send_at(url, requests, arrival_s))


def figures(model: str, seen: Sequence[Seen]) -> LoadFigures:
    """Tokens/s, TTFT and TPOT of the requests that were answered in full."""
    mine = [one for one in seen if one.model == model]
    good = [one for one in mine if one.ok]
    ends = max((one.last_at or one.sent_at for one in good), default=0.0)
    seconds = ends - min((one.sent_at for one in good), default=0.0)
    ttft = sorted(one.ttft_ms for one in good)
    tpot = sorted(one.tpot_ms for one in good if one.tokens > 1)
    return LoadFigures(
        model=model,
        requests=len(mine),
        failed=len(mine) - len(good),
        seconds=seconds,
        output_tokens_per_s=sum(one.tokens for one in good) / seconds if seconds else 0.0,
        ttft_mean_ms=fmean(ttft) if ttft else float("nan"),
        ttft_p95_ms=_p95(ttft),
        tpot_mean_ms=fmean(tpot) if tpot else float("nan"),
        tpot_p95_ms=_p95(tpot),
        errors=tuple(sorted({one.error for one in mine if one.error}))[:3],
    )


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False
    )


async def _send_at(
    url: str, requests: Sequence[LoadRequest], arrival_s: Sequence[float]
) -> list[Seen]:
    began = time.perf_counter()
    async with _client(url) as client:

        async def one(request: LoadRequest, at: float) -> Seen:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            return await _one(client, request)

        pairs = zip(requests, arrival_s, strict=True)
        return list(await asyncio.gather(*(one(*pair) for pair in pairs)))


async def _send(url: str, requests: Sequence[LoadRequest], concurrency: int) -> list[Seen]:
    waiting, seen = list(reversed(requests)), list[Seen]()
    async with _client(url) as client:

        async def work() -> None:
            while waiting:
                seen.append(await _one(client, waiting.pop()))
                report("requests", len(seen), len(requests))

        await asyncio.gather(*(work() for _ in range(min(concurrency, len(requests)))))
    return seen


async def _one(client: httpx.AsyncClient, request: LoadRequest) -> Seen:
    seen = Seen(request.model, time.perf_counter())
    try:
        async with client.stream("POST", "/v1/completions", json=request.body()) as response:
            if response.status_code != httpx.codes.OK:
                seen.error = f"status {response.status_code}"
                return seen
            async for line in response.aiter_lines():
                _take(seen, line)
    except httpx.HTTPError as error:
        seen.error = f"{type(error).__name__}: {error}"
    if not seen.error and seen.tokens < request.output_tokens:
        seen.error = f"{seen.tokens} of {request.output_tokens} tokens"
    return seen


def _take(seen: Seen, line: str) -> None:
    """One line of an event stream."""
    if not line.startswith("data:") or line == "data: [DONE]":
        return
    event = json.loads(line.removeprefix("data:"))
    if "error" in event:
        seen.error = str(event["error"].get("message"))
    if event.get("choices"):
        now = time.perf_counter()
        seen.first_at, seen.last_at = seen.first_at or now, now
    if event.get("usage"):
        seen.tokens = int(event["usage"]["completion_tokens"])


def _lengths(mean: float, p95: float, count: int, draw: random.Random) -> list[int]:
    """Long ones have the p95 length, the others what keeps the mean; at least one token."""
    long = min(LONG_SHARE, mean / p95)
    short = max(1.0, (mean - long * p95) / (1.0 - long))
    many = round(long * count)
    found = [round(p95)] * many + [round(short)] * (count - many)
    draw.shuffle(found)
    return found


def _p95(values: Sequence[float]) -> float:
    found = p95(values)
    return float("nan") if found is None else found

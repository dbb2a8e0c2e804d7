"""The gateway: what it adds to a stream's events, and what becomes of requests in a bad hour.

    python -m bench.gateway [--streams 200] [--rate 10] [--seconds 10] [--requests 10000]
                            [--gateways 1] [--json]

First streams at a fixed rate, in turns direct to an engine and through the gateway; they begin over
two seconds, and events count from when all have begun: `added_*_ms` is the difference of the two
quantiles of the time from an event's sending to its arrival. Then requests to three models while
engines are killed, come back, leave the routes, and serve another model at the same address, to
gateways in turns: `hung` have no end after 30 s, `wrong_model` were answered by another model than
asked for, `unclean` ended in neither a whole answer nor an error that says so. Engines and gateways
are processes of their own; `*_cpu_share` is what each computed of the time of its turns, and the
client's of all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import uvloop

from executor.processes import die_with_parent
from executor.routes import Route, Routes, write_routes
from planner.types import Phase

HUNG_S = 30.0
MODELS = ("org/a", "org/b", "org/c")
ENGINES = 6
AT_ONCE = 64
BEGIN_S = 2.0
SEEN_S = 1.2  # until gateways have read new routes: they look twice a second
UP_S = 30.0
TURNS = 4
SENT = re.compile(rb'"sent": ([0-9.]+)')
DONE = b"data: [DONE]\n\n\r\n0\r\n\r\n"  # the last chunk, and the end of chunks


def main() -> None:
    """Both parts; the last line is a JSON object with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=10.0, help="events/s of a stream")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a turn; there are four")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--gateways", type=int, default=1, help="that take those in turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = {
        **measure_added(asked.streams, asked.rate, asked.seconds),
        **asyncio.run(bad_hour(asked.requests, asked.seed, asked.gateways)),
    }
    for name, value in found.items():
        print(f"{name}: {value}")
    if asked.json:
        print(json.dumps(found))


def measure_added(streams: int, rate: float, seconds: float) -> dict[str, Any]:
    """Quantiles of the time of events, direct and through the gateway."""
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        port = free_port()
        engine = start_engine(MODELS[0], port, 1.0 / rate)
        stack.callback(end, engine)
        write_routes(Path(home) / "routes.json", routes_of({port: MODELS[0]}))
        gateway, process = stack.enter_context(gateway_at(Path(home)))
        delays: dict[str, list[float]] = {"direct": [], "gateway": []}
        pids = {"client": os.getpid(), "engine": engine.pid, "gateway": process.pid}
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        began = time.monotonic()
        for turn in range(TURNS):
            name = "gateway" if turn % 2 else "direct"
            url = gateway if turn % 2 else f"http://127.0.0.1:{port}"
            delays[name] += uvloop.run(streamed(url, streams, round(rate * seconds), 1.0 / rate))
        took_s = time.monotonic() - began
        used = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    events = len(delays["gateway"])
    found: dict[str, Any] = {"streams": streams, "events": events}
    passed = events * (seconds + BEGIN_S) / seconds  # those while streams began too
    found["cpu_us_per_event"] = round(1e6 * used["gateway"] / passed, 1)  # of the gateway
    for name, turns in (("client", TURNS), ("engine", TURNS), ("gateway", TURNS // 2)):
        found[f"{name}_cpu_share"] = round(used[name] / (took_s * turns / TURNS), 3)
    for name, quantile in (("p50", 0.5), ("p99", 0.99)):
        direct, through = (1000.0 * float(np.quantile(delays[x], quantile)) for x in delays)
        found[f"direct_{name}_ms"] = round(direct, 3)
        found[f"added_{name}_ms"] = round(through - direct, 3)
    return found


async def streamed(url: str, streams: int, count: int, gap_s: float) -> list[float]:
    """Seconds from sending to arrival of events, from when all streams have begun.

    They begin one after another over `BEGIN_S`, and last so much longer.
    """
    count += round(BEGIN_S / gap_s)
    all_began = time.monotonic() + BEGIN_S + gap_s
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(
        {"model": MODELS[0], "prompt": "x", "stream": True, "max_tokens": count}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"

    async def one(number: int) -> list[float]:
        await asyncio.sleep(BEGIN_S * number / streams)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        found, tail = [], b""
        while not tail.endswith(DONE):
            data = await reader.read(2**16)
            now = time.monotonic()
            if not data:
                raise RuntimeError(f"a stream broke off at {url}")
            tail = (tail + data)[-len(DONE) :]
            found += [now - sent for sent in map(float, SENT.findall(data)) if sent > all_began]
        writer.close()
        return found

    return [delay for each in await asyncio.gather(*map(one, range(streams))) for delay in each]


@dataclass
class Site:
    """Engines that come and go, and the routes to them."""

    file: Path
    rng: random.Random
    models: dict[int, str] = field(default_factory=dict)  # by port
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    routed: set[int] = field(default_factory=set)
    done: Counter[str] = field(default_factory=Counter)

    async def start(self) -> None:
        """All engines, two of each model."""
        for number in range(ENGINES):
            port = free_port()
            self.models[port] = MODELS[number % len(MODELS)]
            await self._up(port)
            self.routed.add(port)
        self.write()

    async def disturb(self) -> None:
        """Something at random, again and again."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.1, 0.5))
            port = self.rng.choice(sorted(self.models))
            what = self.rng.choice(("kill", "route", "other model"))
            self.done[what] += 1
            if what == "kill":  # the routes don't know it
                end(self.processes[port])
                await asyncio.sleep(self.rng.uniform(0.0, 0.5))
                await self._up(port)
            elif what == "route":
                self.routed ^= {port}
                self.write()
            else:  # as the controller does: out of the routes, seen, stopped, another one
                self.routed.discard(port)
                self.write()
                await asyncio.sleep(SEEN_S)
                end(self.processes[port])
                self.models[port] = self.rng.choice(MODELS)
                await self._up(port)
                self.routed.add(port)
                self.write()

    def write(self) -> None:
        """The routes as they are now."""
        write_routes(self.file, routes_of({port: self.models[port] for port in self.routed}))

    def end(self) -> None:
        """All processes."""
        for process in self.processes.values():
            end(process)

    async def _up(self, port: int) -> None:
        started = asyncio.to_thread(start_engine, self.models[port], port, 0.01)
        self.processes[port] = await started


async def bad_hour(requests: int, seed: int, gateways: int = 1) -> dict[str, Any]:
    """What became of so many requests while engines and routes changed."""
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        site = Site(Path(home) / "routes.json", random.Random(seed))
        stack.callback(site.end)
        await site.start()
        urls = [stack.enter_context(gateway_at(Path(home)))[0] for _ in range(gateways)]
        numbers, rng = iter(range(requests)), random.Random(seed + 1)
        disturbing = asyncio.create_task(site.disturb())
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:

            async def ask_on() -> None:
                for number in numbers:
                    url = urls[number % gateways]
                    outcomes[await outcome(client, url, rng)] += 1

            await asyncio.gather(*(ask_on() for _ in range(AT_ONCE)))
        disturbing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await disturbing
    bad = ("hung", "wrong_model", "unclean")
    return {
        "requests": sum(outcomes.values()),
        **{name: outcomes[name] for name in bad},
        "answered": outcomes["answered"],
        "errors": {name: outcomes[name] for name in sorted(outcomes) if name.startswith("error")},
        "disturbed": dict(sorted(site.done.items())),
    }


async def outcome(client: httpx.AsyncClient, url: str, rng: random.Random) -> str:
    """How one request ended."""
    model, stream, count = rng.choice(MODELS), rng.random() < 0.7, rng.randint(1, 20)
    body = {"model": model, "prompt": "x", "max_tokens": count, "stream": stream}
    try:
        async with asyncio.timeout(HUNG_S):
            answer = await client.post(f"{url}/v1/completions", json=body)
    except TimeoutError:
        return "hung"
    except httpx.HTTPError:
        return "unclean"
    try:
        if answer.status_code != httpx.codes.OK:
            return f"error {answer.status_code} {answer.json()['error']['code']}"
        events = events_of(answer.text) if stream else [answer.json()]
    except (ValueError, KeyError, TypeError):
        return "unclean"
    if any(event.get("model", model) != model for event in events):
        return "wrong_model"
    if stream and "error" in events[-1]:
        return "error in a stream"
    if stream and not answer.text.endswith("data: [DONE]\n\n"):
        return "unclean"
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    return "answered" if text == "x" * count else "unclean"


def events_of(text: str) -> list[dict[str, Any]]:
    """What a stream's lines hold."""
    lines = [line[5:] for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line.strip() != "[DONE]"]


def routes_of(models: dict[int, str]) -> Routes:
    """A replica for every port."""
    routes = [
        Route(
            replica_id=f"{port}-{model}", model=model, phase=Phase.AGGREGATED,
            urls=(f"http://127.0.0.1:{port}",),
        )
        for port, model in sorted(models.items())
    ]  # fmt: skip
    return Routes(models=MODELS, routes=tuple(routes))


@contextlib.contextmanager
def gateway_at(home: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`coral gateway` on a home: its address and process."""
    port = free_port()
    command = [sys.executable, "-m", "coral", "gateway", "--home", str(home), "--port", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent
    )
    try:
        ends = time.monotonic() + UP_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                break
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError("the gateway does not come up")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process
    finally:
        end(process)


def cpu_seconds(pid: int) -> float:
    """That a process has computed."""
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def start_engine(model: str, port: int, gap_s: float) -> subprocess.Popen[bytes]:
    """A stand-in that listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gateway_engine", model, str(port), "--gap", str(gap_s)],
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    if process.stdout is None or process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"no engine at port {port}")
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """At once."""
    process.kill()
    process.wait()


def free_port() -> int:
    """One that nothing listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()

"""Coral's pipelines beside stock vLLM's, on two cores of this machine.

    python -m bench.vllm --json

A Llama with random weights (float32) wide enough that layers are most of a step, served over HTTP
by the commands that stage plans have: closed loops of requests in flight, every worker on one core.
`ratio`: output tokens/s of Coral's pipeline of two equal stages, one on each core, over stock
vLLM's two-node pipeline of the same. `dp_gain`: of one short and one long stage, tokens/s when the
long one has a node on each core over when it has one node; the short stage and the servers have the
core that is left, or share both. Every load is sent several times; the fastest counts, all are
shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from bench.servers import running
from executor.pipeline_plan import plan_pipelines
from executor.stage_plan import EngineSettings, Host, ReplicaPlan, plan_stages
from executor.vllm.environment import PIPELINES, TOOLS, require_vllm
from planner.types import Phase, Placement, Stage, StageNode
from tasks.local_site import ENVIRONMENT

MODEL = "bench"
READY_S = 400.0
KV_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Load:
    """A closed loop."""

    in_flight: int = 64  # 32 in each of the two batches under way: work per node falls with nodes
    requests: int = 128
    prompt: int = 32
    output: int = 32
    times: int = 3


@dataclass(frozen=True)
class Served:
    """One layout's figures."""

    name: str
    tokens_per_s: float  # the fastest
    all_tokens_per_s: tuple[float, ...]
    start_s: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--times", type=int, default=Load.times)
    parser.add_argument("--only", choices=["ratio", "dp_gain"])
    options = parser.parse_args()
    load, served = Load(times=options.times), []
    with TemporaryDirectory() as folder:
        settings = settings_of(Path(folder) / "model", options.layers, options.hidden)
        for name, plan in plans(settings, options.layers, options.only):
            served.append(measure(name, plan, load, Path(folder)))
            print(f"{name}: {served[-1].tokens_per_s:.1f} tokens/s", file=sys.stderr, flush=True)
    found = {one.name: one for one in served}
    result: dict[str, object] = {
        "layers": options.layers, "hidden": options.hidden, "in_flight": load.in_flight,
        "requests": load.requests, "prompt": load.prompt, "output": load.output,
        "tokens_per_s": {one.name: round(one.tokens_per_s, 1) for one in served},
        "all_tokens_per_s": {n: [round(x, 1) for x in s.all_tokens_per_s]
                             for n, s in found.items()},
    }  # fmt: skip
    for key, above, below in (
        ("ratio", "coral 1:1", "stock 1:1"),
        ("dp_gain", "coral short:{long,long}", "coral short:long"),
    ):
        if {above, below} <= found.keys():
            result[key] = round(found[above].tokens_per_s / found[below].tokens_per_s, 3)
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))


def settings_of(folder: Path, layers: int, hidden: int) -> EngineSettings:
    """Of a model that is made there."""
    python = str(require_vllm(".venv-vllm/bin/python"))
    words = [python, str(TOOLS / "tiny_model.py"), str(folder)]
    subprocess.run([*words, "--layers", str(layers), "--hidden", str(hidden)], check=True)
    return EngineSettings(
        command=(python, str(TOOLS / "launch.py")), model_path=str(folder), served_name=MODEL,
        max_model_len=256, dtype="float32", kv_cache_bytes=KV_BYTES, max_num_seqs=64,
        max_num_batched_tokens=512, block_size=32,
        environment={**ENVIRONMENT, "PYTHONPATH": str(PIPELINES)},
        arguments=("--no-enable-prefix-caching",),
    )  # fmt: skip


def plans(
    settings: EngineSettings, layers: int, only: str | None
) -> Iterator[tuple[str, ReplicaPlan]]:
    """Layouts by name; a host is a core."""
    half, short = (layers // 2, layers - layers // 2), (1, layers - 1)
    python = settings.command[0]

    def coral(counts: tuple[int, int], *cores: Sequence[str]) -> ReplicaPlan:
        hosts = [[host(core) for core in mine] for mine in cores]
        made = placement(counts, [len(mine) for mine in cores])
        return plan_pipelines("r", Phase.AGGREGATED, made, hosts, settings, python, "bench")

    if only != "dp_gain":
        made = placement(half, [1, 1])
        stock = plan_stages("r", Phase.AGGREGATED, made, [host("0"), host("1")], settings)
        yield "stock 1:1", stock
        yield "coral 1:1", coral(half, ["0"], ["1"])
    if only != "ratio":
        yield "coral short:long", coral(short, ["1"], ["0"])
        yield "coral short:{long,long}", coral(short, ["1"], ["0", "1"])


def placement(layers: Sequence[int], nodes: Sequence[int]) -> Placement:
    """Stages of so many equal nodes."""
    stages, first = [], 0
    for count, number in zip(layers, nodes, strict=True):
        stages.append(Stage(first, count, (StageNode("CPU x1", 1, 1, 1),) * number))
        first += count
    return Placement(tuple(stages), 2, 8, 1.0, 1.0, 1.0)


def host(core: str) -> Host:
    """Ports that nobody has now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = 20000 + free.getsockname()[1] % 10000 // 20 * 20
    return Host(f"core{core}", "127.0.0.1", port, (core,))


def measure(name: str, plan: ReplicaPlan, load: Load, folder: Path) -> Served:
    """Start, warm up, send."""
    began = time.monotonic()
    (url,) = plan.api_urls
    commands = [(process.argv, process.environment) for process in plan.processes]
    with running(commands, url, folder / f"{name.replace(' ', '-')}.log", READY_S):
        start_s = time.monotonic() - began
        asyncio.run(send(url, load, load.in_flight))
        rates = tuple(asyncio.run(send(url, load, load.requests)) for _ in range(load.times))
    return Served(name, max(rates), rates, start_s)


async def send(url: str, load: Load, requests: int) -> float:
    """Output tokens per second of a closed loop."""
    gate = asyncio.Semaphore(load.in_flight)
    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:

        async def one(number: int) -> int:
            prompt = [(17 * number + 3 * k) % 500 + 1 for k in range(load.prompt)]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": load.output,
                    "temperature": 0.0, "ignore_eos": True}  # fmt: skip
            async with gate:
                answer = await client.post(f"{url}/v1/completions", json=body)
            answer.raise_for_status()
            return int(answer.json()["usage"]["completion_tokens"])

        began = time.monotonic()
        tokens = await asyncio.gather(*(one(number) for number in range(requests)))
    return sum(tokens) / (time.monotonic() - began)


if __name__ == "__main__":
    main()

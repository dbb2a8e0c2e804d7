"""All-reduce by message size, by torch.distributed, and the hop between two processes."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

START = Path(__file__).with_name("start.py")
PIPELINES = Path(__file__).parents[1] / "vllm_pipeline"
MESSAGES = tuple(4**n for n in range(5, 13))  # 1 KiB to 16 MiB
REPEATS, WARM = 15, 3
TIMEOUT_S = 120.0


def measure_links(device: str, sizes: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
    """All-reduce for each size above one; the hop between two processes of this machine.

    The hop is over what Coral's pipelines use (ZeroMQ, encrypted), or, where their package can't
    run, over torch.distributed.
    """
    reduces = []
    for size in sizes:
        if size > 1:
            say(f"all-reduce over {size}")
            reduces += [{"tp": size, **row} for row in _run("all_reduce", size, device)]
    say("hop between two processes")
    if found := _pipeline_hop():
        return {"all_reduce": reduces, "hop": found, "hop_backend": "ZeroMQ"}
    pair = device if max(sizes) > 1 else "cpu"
    return {"all_reduce": reduces, "hop": _run("hop", 2, pair), "hop_backend": _backend(pair)}


def _pipeline_hop() -> list[dict[str, Any]]:
    """Bytes and ms; none where the package's needs are not installed."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "coral_vllm_pipeline.hop"],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
            env={**os.environ, "PYTHONPATH": str(PIPELINES)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return []
    found: list[dict[str, Any]] = json.loads(done.stdout) if done.returncode == 0 else []
    return found


def _run(kind: str, size: int, device: str) -> list[dict[str, Any]]:
    port = _free_port()
    processes = []
    for rank in range(size):
        asked = {"kind": kind, "rank": rank, "size": size, "device": device, "port": port}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(START), "--link", json.dumps(asked)],
                stdout=subprocess.PIPE, text=True, start_new_session=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            )
        )  # fmt: skip
    try:
        answers = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found: list[dict[str, Any]] = json.loads(answers[0].splitlines()[-1])
    return found


def main(asked: dict[str, Any]) -> None:
    """One rank: measure, rank 0 prints."""
    import torch
    import torch.distributed as dist

    device = asked["device"]
    if device == "cuda":
        torch.cuda.set_device(asked["rank"])
    dist.init_process_group(
        _backend(device), init_method=f"tcp://127.0.0.1:{asked['port']}",
        rank=asked["rank"], world_size=asked["size"],
    )  # fmt: skip
    found = [{"bytes": size, "ms": _message(torch, dist, asked, size)} for size in MESSAGES]
    if asked["rank"] == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def _message(torch: Any, dist: Any, asked: dict[str, Any], size: int) -> float:
    """Milliseconds; what arrives is checked."""
    device = asked["device"]
    data = torch.empty(size // 2, dtype=torch.float16, device=device)
    times = []
    for _ in range(WARM + REPEATS):
        data.fill_(1.0)
        dist.barrier()
        _wait(torch, device)
        started = time.perf_counter()
        if asked["kind"] == "all_reduce":
            dist.all_reduce(data)
        elif asked["rank"] == 0:  # there and back: half of it is one way
            dist.send(data, 1)
            dist.recv(data, 1)
        else:
            dist.recv(data, 0)
            data.add_(1.0)
            dist.send(data, 0)
        _wait(torch, device)
        times.append(1e3 * (time.perf_counter() - started))
        wanted = asked["size"] if asked["kind"] == "all_reduce" else 2.0
        if not bool((data == wanted).all()):
            raise RuntimeError(f"{asked['kind']} of {size} bytes gave something else")
    ways = 1.0 if asked["kind"] == "all_reduce" else 2.0
    return statistics.median(times[WARM:]) / ways


def _wait(torch: Any, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _backend(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port

"""How long a message takes from stage to stage, over the transport that pipelines use.

    python -m coral_vllm_pipeline.hop [zmq|gloo]             # between two processes of this machine
    python -m coral_vllm_pipeline.hop LAYOUT SIDE            # between two machines, SIDE 0 and 1

There and back, half of it is one way; the median of several. The layout is one of three stages: the
first and the last are this side's, the one between the other's. Prints JSON: bytes and ms.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import zmq

from . import PipelineError
from .layout import Layout, Node, Stage, read_layout

MESSAGES = tuple(4**n for n in range(5, 13))  # 1 KiB to 16 MiB
REPEATS, WARM = 15, 3


def main() -> None:
    """One side, or both."""
    words = sys.argv[1:]
    try:
        if len(words) == 2 and words[1] in {"0", "1"}:
            found = measure(read_layout(words[0]), int(words[1]))
        elif len(words) < 2:
            found = here(*words)
        else:
            sys.exit(__doc__)
    except PipelineError as error:
        sys.exit(str(error))
    print(json.dumps(found))


def here(transport: str = "zmq") -> list[dict[str, float]]:
    """Between two processes of this machine, with keys as between machines."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    port = _ports(4)
    stages = tuple(Stage(1, (Node("127.0.0.1", port + k, 1),)) for k in range(3))
    layout = Layout("127.0.0.1", port + 1, stages, public, secret, transport)
    other = multiprocessing.get_context("spawn").Process(target=measure, args=(layout, 1))
    other.start()
    try:
        return measure(layout, 0)
    finally:
        other.join(5.0)
        other.kill()


def measure(layout: Layout, side: int) -> list[dict[str, float]]:
    """Side 0 has the figures."""
    import torch

    from .transport import make_transport

    torch.set_num_threads(1)
    places = [(0, 0, 0), (2, 0, 0)] if side == 0 else [(1, 0, 0)]
    with ThreadPoolExecutor(len(places)) as pool:  # a process group waits for all its ranks
        made = list(pool.map(lambda place: make_transport(layout, place), places))
    sends, receives = made[0], made[-1]
    found, step = [], 0
    for size in MESSAGES:
        rows, times = torch.zeros(size // 4), []
        for _ in range(WARM + REPEATS):
            step += 1
            began = time.perf_counter()
            if side == 0:
                sends.send(step, 0, rows)
                receives.receive(step, 0, torch.empty_like(rows)).sum()
            else:
                sends.send(step, 0, receives.receive(step, 0, torch.empty_like(rows)).clone())
            times.append(1000.0 * (time.perf_counter() - began))
        found.append({"bytes": size, "ms": statistics.median(times[WARM:]) / 2.0})
    if side:
        time.sleep(0.5)  # the last answer is on its way
    return found


def _ports(count: int) -> int:
    """The first of so many that nobody has now."""
    while True:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            first = int(free.getsockname()[1])
        try:
            with_these = [socket.socket() for _ in range(count)]
            for number, one in enumerate(with_these):
                one.bind(("127.0.0.1", first + number))
            return first
        except (OSError, OverflowError):
            continue
        finally:
            for one in with_these:
                one.close()


if __name__ == "__main__":
    main()

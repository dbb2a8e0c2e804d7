"""The workers of one node: `python -m coral_vllm_pipeline.node LAYOUT STAGE NODE`.

One process for every rank. When one ends the others are ended too, and the node with them: whoever
started it sees that.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path

from .layout import Layout, read_layout

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Start the workers and wait."""
    layout = read_layout(Path(sys.argv[1]))
    stage, number = int(sys.argv[2]), int(sys.argv[3])
    sys.exit(run(layout, stage, number))


def run(layout: Layout, stage: int, number: int) -> int:
    """Until one of the workers ends; its exit code."""
    node = layout.stages[stage].nodes[number]
    context = multiprocessing.get_context("spawn")
    # New with every start: vLLM names shared memory after it, and a killed one leaves it behind.
    world = f"file://{tempfile.gettempdir()}/coral-world-{uuid.uuid4().hex}"
    workers = []
    for rank in range(node.tensor_parallel_size):
        worker = context.Process(target=work, args=(layout, (stage, number, rank), world))
        _bind(node.cores[rank] if node.cores else "")
        worker.start()
        workers.append(worker)
    multiprocessing.connection.wait([worker.sentinel for worker in workers])
    codes = [worker.exitcode for worker in workers if worker.exitcode is not None]
    for worker in workers:
        worker.join(2.0)
        worker.kill()
    return codes[0] if codes else 1


def work(layout: Layout, place: tuple[int, int, int], world: str) -> None:
    """One worker's process; it ends with the one that started it, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if multiprocessing.parent_process() is None:
        return
    from .worker import PipelineWorker

    PipelineWorker(layout, place, world).run()


def _bind(cores: str) -> None:
    """A CPU worker's threads, before it starts: OpenMP reads this at import."""
    if not cores:
        return
    numbers = [
        core
        for part in cores.split(",")
        for core in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)
    ]
    os.environ["OMP_NUM_THREADS"] = str(len(numbers))
    os.environ["OMP_PLACES"] = "{" + ",".join(map(str, numbers)) + "}"
    os.environ["OMP_PROC_BIND"] = "true"


if __name__ == "__main__":
    main()

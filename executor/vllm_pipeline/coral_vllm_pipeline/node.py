"""The workers of one node: `python -m coral_vllm_pipeline.node LAYOUT STAGE NODE [MODEL]`.

One process for every rank. When one ends the others are ended too, and the node with them: whoever
started it sees that. MODEL is where this node has its layers, if not where the head has its own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from types import FrameType

from . import PipelineError
from .layout import PLACE, Layout, place_layout

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Start the workers and wait."""
    if len(sys.argv) not in {4, 5}:
        sys.exit(__doc__)
    try:
        layout = place_layout(sys.argv[1])
    except PipelineError as error:
        sys.exit(str(error))
    places = {(str(s), str(n)): (s, n) for s, n, _ in layout.places}
    if (sys.argv[2], sys.argv[3]) not in places:
        sys.exit(
            f"the layout has no node {sys.argv[3]} in a stage {sys.argv[2]}; both count from 0"
        )
    stage, number = places[sys.argv[2], sys.argv[3]]
    sys.exit(run(layout, stage, number, sys.argv[4] if len(sys.argv) > 4 else ""))


def run(layout: Layout, stage: int, number: int, model: str = "") -> int:
    """Until one of the workers ends; its exit code.

    SIGTERM is left to a head that has begun: it finishes its requests and then ends the workers.
    """
    node = layout.stages[stage].nodes[number]
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    signal.signal(signal.SIGTERM, _unless(begun))
    # New with every start: vLLM names shared memory after it, and a killed one leaves it behind.
    world = Path(tempfile.gettempdir()) / f"coral-world-{uuid.uuid4().hex}"
    workers = []
    for rank in range(node.tensor_parallel_size):
        place = (stage, number, rank)
        worker = context.Process(target=work, args=(layout, place, f"file://{world}", model, begun))
        _bind(node.cores[rank] if node.cores else "")
        worker.start()
        workers.append(worker)
    multiprocessing.connection.wait([worker.sentinel for worker in workers])
    codes = [worker.exitcode for worker in workers if worker.exitcode is not None]
    for worker in workers:
        worker.join(2.0)
        worker.kill()
    world.unlink(missing_ok=True)
    return codes[0] if codes else 1


def work(layout: Layout, place: tuple[int, int, int], world: str, model: str, begun: Event) -> None:
    """One worker's process; it ends with the one that started it, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        return
    signal.signal(signal.SIGTERM, _unless(begun))
    os.environ[PLACE] = ",".join(map(str, place))
    from .worker import PipelineWorker

    PipelineWorker(layout, place, world, model, begun.set).run()


def _unless(begun: Event) -> Callable[[int, FrameType | None], None]:
    def end(number: int, _: FrameType | None) -> None:
        if not begun.is_set():
            os._exit(128 + number)

    return end


def _bind(cores: str) -> None:
    """A CPU worker's threads and libraries, before it starts: both are read at load.

    The libraries are those that vLLM gives its own workers on CPUs.
    """
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
    given = os.environ.get("LD_PRELOAD", "")
    wanted = [_library("vllm", "libs/libtcmalloc*.so*"), _library("torch", "lib/libgomp*.so*"),
              _library("torch", "../torch.libs/libgomp*.so*")]  # fmt: skip
    found = [one for one in wanted if one and Path(one).name not in given]
    os.environ["LD_PRELOAD"] = ":".join([*found, *filter(None, [given])])


def _library(package: str, pattern: str) -> str:
    """The first such file of an installed package, without importing it; '' if there is none."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    files = (file for folder in folders or () for file in sorted(Path(folder).glob(pattern)))
    return str(next(files, ""))


if __name__ == "__main__":
    main()

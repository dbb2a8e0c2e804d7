"""Times work on a device: warm-up, CUDA graph or synchronised calls, median, outputs checked.

Before every timed run the output is filled with NaN and the input with new numbers; after it the
output must be finite and differ from the one before. A kernel that does nothing, or answers what it
had, is found out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

WARM, LEAST, MOST = 3, 9, 60  # runs
SPENT_S = 0.6  # of one point, about


class WrongOutputError(Exception):
    """What was timed did not compute its output."""


def median_ms(
    work: Callable[[], Any], refill: Callable[[], None], device: str, graph: bool
) -> tuple[float, bool]:
    """Milliseconds of `work` (median of many), and whether it ran as a CUDA graph.

    Raises WrongOutputError.
    """
    import torch

    with torch.inference_mode():
        refill()
        for _ in range(WARM):
            result = work()
        out = torch.empty_like(result)

        def body() -> None:
            out.copy_(work())

        replay, captured = _replay(torch, body, device, graph)
        before: Any = None
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < LEAST or (len(times) < MOST and time.perf_counter() - began < SPENT_S):
            refill()
            out.fill_(float("nan"))
            times.append(_one_ms(torch, replay, device))
            if not bool(torch.isfinite(out).all()):
                raise WrongOutputError("a timed kernel left its output unwritten")
            if before is not None and bool(torch.equal(before, out)):
                raise WrongOutputError("a timed kernel gave the same output for another input")
            before = out.clone()
    return statistics.median(times), captured


def _replay(
    torch: Any, body: Callable[[], None], device: str, graph: bool
) -> tuple[Callable[[], None], bool]:
    if device != "cuda" or not graph:
        return body, False
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        body()
    return captured.replay, True


def _one_ms(torch: Any, run: Callable[[], None], device: str) -> float:
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)

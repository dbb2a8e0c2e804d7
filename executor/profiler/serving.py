"""A short real run of the whole engine: requests in a closed loop."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from .engine_process import EngineProcess

COUNTED = 2  # requests counted, per request in flight (at least LEAST_REQUESTS)
LEAST_REQUESTS = 6
RUNS = 2  # the fastest counts: what else happens on a machine only ever adds to a time


def measure_serving(
    engine: EngineProcess, tp: int, points: Sequence[tuple[int, ...]], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """TPOT and throughput at points of (requests in flight, prompt, output)."""
    found = []
    engine.ask_once("serve", concurrency=2, prompt=32, output=8, requests=2)  # warm-up
    for concurrency, prompt, output in points:
        say(f"serving {concurrency} requests of {prompt} + {output} tokens")
        asked = {"concurrency": concurrency, "prompt": prompt, "output": output}
        wanted = max(LEAST_REQUESTS, COUNTED * concurrency)
        runs = [engine.ask_once("serve", **asked, requests=wanted) for _ in range(RUNS)]
        run = min(runs, key=lambda one: statistics.fmean(one["tpot_ms"]))
        found.append(
            {
                **asked,
                "layers": engine.layers,
                "tp": tp,
                "requests": run["requests"],
                "seconds": run["seconds"],
                "tpot_ms": statistics.fmean(run["tpot_ms"]),
                "ttft_ms": statistics.fmean(run["ttft_ms"]),
                "throughput_rps": run["requests"] / run["seconds"],
                "mean_batch": run["mean_batch"],
                "waited": run["waited"],
                "all_tpot_ms": [statistics.fmean(one["tpot_ms"]) for one in runs],
                "all_throughput_rps": [one["requests"] / one["seconds"] for one in runs],
            }
        )
    return found

"""The simulator against real vLLM servers on this machine's cores, under Poisson load.

    python -m bench.serving --json

Makes a small Llama (float32), profiles one layer of it as `coral profile run` does, and starts
`vllm serve` on one core. Requests come at random (Poisson) at shares of the rate at which the
simulated engine is full, in rounds that take every load in turn, since a shared host is not equally
fast from minute to minute; the same arrivals and lengths go through the simulator with the
profile's tables. Compared per load: mean TPOT, output tokens/s, and
the median TTFT. `front_ms`, what a request spends outside the engine (HTTP, tokens to text), is the
median TTFT of single requests on the idle server less the simulated one: measured before the loads,
added to the simulated TTFT.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from bench.servers import running
from bench.simulation import single_engines
from executor.vllm.environment import TOOLS
from planner.perf.model import PerformanceModel, family_of
from planner.perf.overhead import EnginePoint, fit_engine_overhead
from planner.types import Link, NodeClass
from simulator.fleet import Engine
from simulator.measures import tpot_ms
from simulator.run import simulate
from simulator.trace import Trace
from tasks.load import LoadRequest, Seen, send, send_at
from tasks.profile_file import read_measurements
from tasks.profile_run import ProfileRequest, require_torch, run_profiler
from tasks.profile_tables import Profile, performance_of, profile_of

NAME, LAYERS, HIDDEN = "small-llama", 8, 1024
PLACES, BUDGET, LONGEST = 8, 512, 512
PROMPTS, OUTPUTS = (32, 64, 128), (16, 32, 64)  # drawn evenly
LOADS = (0.3, 0.5, 0.7, 0.85)
ROUNDS = 3
READY_S = 600.0
SINGLE = 7  # requests on the idle server


@dataclass(frozen=True)
class Figures:
    """Of all requests at one load."""

    tpot_ms: float  # mean
    ttft_p50_ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class Row:
    """One load, measured and simulated."""

    load: float
    requests: int
    failed: int
    measured: Figures
    simulated: Figures
    waited_share: float  # of the load's time, in which the engine's thread waited for a core

    def error(self, name: str) -> float:
        """Relative: simulated over measured."""
        return float(getattr(self.simulated, name) / getattr(self.measured, name) - 1.0)


@dataclass(frozen=True)
class Part:
    """A load's requests of one round: times in ms, one entry a request."""

    failed: int
    tpot_ms: np.ndarray
    ttft_ms: np.ndarray
    tokens: float
    seconds: float


def main() -> None:
    """Parse, profile, serve, simulate, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=120, help="of each load")
    parser.add_argument("--minutes", type=float, default=4.0, help="for the profile")
    parser.add_argument("--python", help="interpreter with vLLM [.venv-vllm]")
    parser.add_argument("--folder", type=Path, help="keep model and profile, use what is there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        python = require_torch(options.python)
        model = make_model(python, folder)
        profile = measure(options.python, model, options.minutes, folder)
        performance, engine = simulated_engine(profile)
        with server(python, model, folder) as (url, pid):
            rows, front_ms = compare(url, pid, performance, engine, options.requests)
    result = {
        **_summary(rows),
        "front_ms": round(front_ms, 2),
        "full_rps": round(full_rps(performance, engine), 3),
        "machine": profile.source,
        "rows": [_rounded(asdict(row)) for row in rows],
    }
    print(json.dumps(result, indent=None if options.json else 2))


def make_model(python: Path, folder: Path) -> Path:
    """A random Llama with a tokenizer."""
    model = folder / "model"
    if not (model / "config.json").exists():
        command = [python, TOOLS / "tiny_model.py", model, "--layers", str(LAYERS)]
        subprocess.run([*command, "--hidden", str(HIDDEN)], check=True, capture_output=True)
    return model


def measure(python: str | None, model: Path, minutes: float, folder: Path) -> Profile:
    """Its layer on one core."""
    config = json.loads((model / "config.json").read_text())
    request = ProfileRequest(
        config, NAME, python, device="cpu", backend="vllm", dtype="float32", minutes=minutes
    )
    found = read_measurements(run_profiler(request, folder / "profile.json"))
    return profile_of(found, NAME, found.gpu("CPU"))


def simulated_engine(profile: Profile) -> tuple[PerformanceModel, Engine]:
    """One core that serves the whole model, with the overhead fitted on the profile's short run."""
    rows = {size: table.rows for size, table in profile.tables.items()}
    family = family_of(profile.gpu)
    overhead = fit_engine_overhead(
        [EnginePoint(family, p.measured_tpot_ms, p.predicted_tpot_ms) for p in profile.engine]
    )
    plain = performance_of(profile.gpu, profile.model, rows, profile.all_reduce)
    performance = PerformanceModel(plain.rows, {}, plain.all_reduce, overhead)
    node = NodeClass("CPU x1", profile.gpu, 1, Link.PCIE, 1.0, 1.0)
    lengths = (float(np.mean(PROMPTS)), float(np.mean(OUTPUTS)))
    (engine,) = single_engines(performance, profile.model, node, 1, PLACES, *lengths)
    return performance, replace(engine, token_budget=BUDGET)


def full_rps(performance: PerformanceModel, engine: Engine) -> float:
    """Requests/s where all places are always taken."""
    trace = _trace(400, np.zeros(400), seed=1)
    ends = np.sort(simulate([engine], trace, performance).finish_ms)
    return float(300 / (ends[349] - ends[49]) * 1e3)


def compare(
    url: str, pid: int, performance: PerformanceModel, engine: Engine, count: int
) -> tuple[list[Row], float]:
    """Every load, on both; and what a request spends outside the engine."""
    send(url, _requests(_trace(2 * PLACES, np.zeros(2 * PLACES), seed=2)), PLACES)  # warm-up
    front_ms = _front_ms(url, performance, engine)
    full = full_rps(performance, engine)
    parts: dict[float, list[tuple[Part, Part]]] = {load: [] for load in LOADS}
    waits: dict[float, list[float]] = {load: [] for load in LOADS}
    for number, load in itertools.product(range(ROUNDS), LOADS):
        seed = len(LOADS) * number + LOADS.index(load)
        arrivals = np.random.default_rng(seed).exponential(1.0 / (load * full), count // ROUNDS)
        trace = _trace(count // ROUNDS, np.cumsum(arrivals), seed=10 + seed)
        print(f"load {load:.0%}: {trace.arrival_s[-1]:.0f} s", file=sys.stderr)
        began, waited = time.monotonic(), _waited_s(pid)
        seen = send_at(url, _requests(trace), list(trace.arrival_s))
        waits[load].append((_waited_s(pid) - waited) / (time.monotonic() - began))
        parts[load].append((_measured(seen), _simulated(performance, engine, trace, front_ms)))
    rows = []
    for load, rounds in parts.items():
        measured, simulated = (list(column) for column in zip(*rounds, strict=True))
        rows.append(
            Row(
                load=load,
                requests=ROUNDS * (count // ROUNDS),
                failed=sum(part.failed for part in measured),
                measured=_figures(measured),
                simulated=_figures(simulated),
                waited_share=float(np.mean(waits[load])),
            )
        )
    return rows, front_ms


def _measured(seen: list[Seen]) -> Part:
    good = [one for one in seen if one.ok]
    return Part(
        len(seen) - len(good),
        np.array([one.tpot_ms for one in good]),
        np.array([one.ttft_ms for one in good]),
        sum(one.tokens for one in good),
        max(one.last_at or 0.0 for one in good) - min(one.sent_at for one in good),
    )


def _simulated(
    performance: PerformanceModel, engine: Engine, trace: Trace, front_ms: float
) -> Part:
    result = simulate([engine], trace, performance)
    begins = float(trace.arrival_s[0]) * 1e3
    return Part(
        0,
        tpot_ms(result),
        result.first_ms - trace.arrival_s * 1e3 + front_ms,
        float(trace.output_tokens.sum()),
        (float(result.finish_ms.max()) - begins) * 1e-3,
    )


def _figures(parts: list[Part]) -> Figures:
    return Figures(
        float(np.mean(np.concatenate([part.tpot_ms for part in parts]))),
        float(np.median(np.concatenate([part.ttft_ms for part in parts]))),
        sum(part.tokens for part in parts) / sum(part.seconds for part in parts),
    )


def _waited_s(pid: int) -> float:
    """How long the busiest thread of a server's processes has been ready and not running."""
    found = []
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for task in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            ran, waited, _ = task.read_text().split()
            found.append((int(ran), int(waited)))
    return max(found)[1] * 1e-9


def _front_ms(url: str, performance: PerformanceModel, engine: Engine) -> float:
    """Of single requests, on the idle server."""
    trace = _trace(SINGLE, np.arange(SINGLE) * 1e3, seed=3)
    real = [send(url, [request], 1)[0].ttft_ms for request in _requests(trace)]
    result = simulate([engine], trace, performance)
    said = result.first_ms - trace.arrival_s * 1e3
    return max(0.0, float(np.median(np.array(real) - said)))


def _trace(count: int, arrivals: Any, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.choice(PROMPTS, count), rng.choice(OUTPUTS, count)
    return Trace(("w",), np.asarray(arrivals, float), np.zeros(count, int), prompts, outputs)


def _requests(trace: Trace) -> list[LoadRequest]:
    """Prompts of their own, so that nothing is found in a cache."""
    rng = np.random.default_rng(int(trace.arrival_s.sum() * 1e3) % 2**32)
    sizes = zip(trace.input_tokens, trace.output_tokens, strict=True)
    return [
        LoadRequest(NAME, tuple(int(t) for t in rng.integers(1, 500, prompt)), int(output))
        for prompt, output in sizes
    ]


@contextlib.contextmanager
def server(python: Path, model: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """`vllm serve` on core 0: its address and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    command: list[str | Path] = [
        python, TOOLS / "launch.py", "serve", model, "--served-model-name", NAME,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--max-model-len", str(LONGEST), "--max-num-seqs", str(PLACES),
        "--max-num-batched-tokens", str(BUDGET), "--kv-cache-memory-bytes", str(2**28),
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with running([(command, environment)], url, folder / "server.log", READY_S) as (pid,):
        yield url, pid


def _summary(rows: list[Row]) -> dict[str, object]:
    found: dict[str, object] = {"loads": len(rows), "failed": sum(row.failed for row in rows)}
    for name in Figures.__dataclass_fields__:
        errors = [100.0 * abs(row.error(name)) for row in rows]
        found[f"{name}_error_median_pct"] = round(float(np.median(errors)), 2)
        found[f"{name}_error_max_pct"] = round(max(errors), 2)
    return found


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()

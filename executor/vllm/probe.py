"""Measures real engine steps of a model on one core group of this machine, at two depths.

    python probe.py MODEL OUT.json [--cores 0 1] [--depths 2 6]

The model is run with random weights at each depth, from its config.json alone: what two depths
differ by is layers, the rest is the engine (planner/perf/depths.py takes them apart). Times are
medians of steps after a warm-up. Both depths start at once, since that takes a minute, and measure
one after the other. Runs in the environment of vLLM and imports nothing of Coral.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launch import answer_for_vllm

answer_for_vllm()  # here, so that vLLM's own processes have it too

DECODE = [(batch, context) for batch in (1, 4, 8, 16) for context in (32, 128, 384)]
PREFILL = [(1, tokens) for tokens in (16, 64, 128, 256, 512)]
SPLIT = [(4, 256), (4, 512)]  # the same tokens as four prompts: less attention
STEPS, REPEATS = 15, 5
KV_BYTES = 256 * 2**20
MAX_TOKENS = 8192
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def main() -> None:
    """Parse, measure every depth in a process of its own, write."""
    parser = argparse.ArgumentParser(description="Engine steps of a model at two depths.")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cores", nargs="+", default=["0"], help="core groups alike: 0 1, or 0-3")
    parser.add_argument("--depths", type=int, nargs=2, default=(2, 6))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.model, options.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        depths = [
            Depth(Path(folder), layers, options.model, options.cores[number % len(options.cores)])
            for number, layers in enumerate(options.depths)
        ]
        try:
            for depth in depths:
                depth.wait_until(depth.ready)
            steps = [depth.measured() for depth in depths]
        finally:
            for depth in depths:
                depth.process.kill()
    found = {**provenance(options), "depths": steps}
    draft = options.out.with_suffix(".draft")
    draft.write_text(json.dumps(found, indent=1))
    draft.replace(options.out)


class Depth:
    """The process of one depth: it starts its engine, says so, and waits for its turn."""

    def __init__(self, folder: Path, layers: int, model: Path, cores: str) -> None:
        self.layers, self.out = layers, folder / f"depth{layers}.json"
        self.ready = self.out.with_suffix(".ready")
        copy = folder / f"depth{layers}"
        copy.mkdir()
        config = json.loads((model / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        for name in FILES:
            if (model / name).exists():
                shutil.copy(model / name, copy)
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        command = [sys.executable, __file__, str(copy), str(self.out), "--child"]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=sys.stderr
        )

    def wait_until(self, there: Path) -> None:
        while not there.exists():
            if self.process.poll() is not None:
                sys.exit(f"the engine of {self.layers} layers ended: exit {self.process.poll()}")
            time.sleep(0.1)

    def measured(self) -> dict[str, Any]:
        self.process.communicate(b"go\n")
        self.wait_until(self.out)
        return {"layers": self.layers, **json.loads(self.out.read_text())}


def measure(model: Path, out: Path) -> None:
    """Write the median times of prefill and decode steps, when told to begin."""
    from vllm import EngineArgs, LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model), load_format="dummy", dtype="float32", max_model_len=1024,
            kv_cache_memory_bytes=KV_BYTES, max_num_batched_tokens=MAX_TOKENS, max_num_seqs=32,
            enable_prefix_caching=False, disable_log_stats=True,
        )
    )  # fmt: skip
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    run = Runs(engine, vocabulary)
    out.with_suffix(".ready").touch()
    sys.stdin.readline()
    for batch, tokens in (*PREFILL, *SPLIT):  # warm-up: every shape once
        run.prefill(batch, tokens)
    found = {
        "prefill": [
            {"batch": b, "tokens": n, "ms": median(run.prefill(b, n) for _ in range(REPEATS))}
            for b, n in (*PREFILL, *SPLIT)
        ],
        "decode": [
            {"batch": b, "context": c, "ms": statistics.median(run.decode(b, c))} for b, c in DECODE
        ],
    }
    out.write_text(json.dumps(found))


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


class Runs:
    """Requests to one engine, timed."""

    def __init__(self, engine: Any, vocabulary: int) -> None:
        self.engine, self.vocabulary, self.count = engine, vocabulary, 0

    def prefill(self, batch: int, tokens: int) -> float:
        """Milliseconds from the first of `batch` equal prompts to their last first token."""
        started = time.perf_counter()
        self.add(batch, tokens // batch, 1)
        self.finish()
        return 1e3 * (time.perf_counter() - started)

    def decode(self, batch: int, context: int) -> list[float]:
        """Milliseconds between the steps of `batch` requests over `context` tokens each."""
        self.add(batch, context - STEPS // 2, STEPS + 8)
        times: list[float] = []
        before = 0.0
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            full = len(outputs) == batch and not any(one.finished for one in outputs)
            if full and before:
                times.append(1e3 * (now - before))
            before = now if full else 0.0
        return times[2 : STEPS + 2]

    def add(self, batch: int, tokens: int, output: int) -> None:
        from vllm import SamplingParams

        settings = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
        for _ in range(batch):
            self.count += 1
            prompt = [(7 * self.count + 13 * n) % self.vocabulary for n in range(tokens)]
            self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, settings)

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    """What was measured on what: machine, versions, date, and two rates of the machine."""
    import importlib.metadata

    import torch

    torch.set_num_threads(1)
    return {
        "cpu": cpu_name(),
        "cores": options.cores,
        "torch": torch.__version__,
        "vllm": importlib.metadata.version("vllm"),
        "python": platform.python_version(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "tflops": tflops(torch),
        "memory_gbyte_per_s": copy_rate(torch),
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def tflops(torch: Any) -> float:
    """Of a float32 matrix product on one core, in 1e12 per second."""
    size = 1024
    one = torch.rand(size, size)
    best = min(timed(lambda: one @ one) for _ in range(5))
    return 2.0 * float(size**3) / best / 1e12


def copy_rate(torch: Any) -> float:
    """Bytes read and written by a copy on one core, in 1e9 per second."""
    source = torch.rand(2**25)
    target = torch.empty_like(source)
    best = min(timed(lambda: target.copy_(source)) for _ in range(5))
    return 2.0 * 4.0 * float(source.numel()) / best / 1e9


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

"""Points from vLLM's own steps, at two depths of one model.

Bursts of both depths take turns, so that what else happens on the machine meets both alike. A point
keeps the step times; the planner takes layers and engine apart (planner/perf/depths.py).
"""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path
from typing import IO, Any

from .engine_process import EngineProcess
from .grid import Time, TooLargeError

ROUNDS, LEAST_ROUNDS = 5, 3
POINT_S = 5.0  # after which a point has its least rounds at most
STEPS, REPEATS = 12, 3
WARM_BURSTS = 3  # of an engine that has just started
SLACK = 1.3  # of KV memory: blocks are not full


class VllmBackend:
    """Two engines of one model; `measure` times a point at both."""

    name = "vllm"

    def __init__(
        self, config: dict[str, Any], folder: Path, depths: tuple[int, ...], tp: int,
        options: dict[str, Any], log: IO[str],
    ) -> None:  # fmt: skip
        self.config, self.depths, self.tp, self.options = config, depths, tp, options
        self.kv_tokens = options["kv_tokens"]
        self.engines: list[EngineProcess] = []
        for layers in depths:
            model = folder / f"layers{layers}"
            model.mkdir(parents=True, exist_ok=True)
            (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
            self.engines.append(
                EngineProcess(self._settings(model, layers), self._environment(), log)
            )

    def wait_ready(self) -> None:
        """Raises EngineError."""
        for engine in self.engines:
            if not engine.kernels:
                engine.wait_ready()
                for _ in range(WARM_BURSTS):
                    engine.ask_once("decode", batch=2, context=48, steps=STEPS)

    @property
    def kernels(self) -> str:
        return self.engines[0].kernels

    @property
    def deep(self) -> EngineProcess:
        """Its whole steps are closest to those of a model that serves."""
        return self.engines[-1]

    def measure(self, kind: str, batch: int, tokens: int, context: int) -> dict[str, Any]:
        """Step times at both depths, of several bursts each."""
        needed = batch * (context + tokens // batch + STEPS)
        if needed > self.kv_tokens:
            raise TooLargeError(f"{needed} tokens of KV, {self.kv_tokens} fit")
        asked = _question(kind, batch, tokens, context)
        for engine in self.engines:  # what is compiled or captured for a shape, is at its first use
            engine.ask_once(**{**asked, "steps" if kind == "decode" else "repeats": 1})
        began = time.monotonic()
        rounds: list[list[dict[str, Any]]] = []
        while len(rounds) < ROUNDS:
            if len(rounds) >= LEAST_ROUNDS and time.monotonic() - began > POINT_S:
                break
            rounds.append([engine.ask_once(**asked) for engine in self.engines])
        times = [[statistics.median(one["ms"]) for one in burst] for burst in rounds]
        # What else happens on a machine only ever adds to a time: the least of the bursts counts.
        (shallow, next_shallow), (deep, next_deep) = (
            sorted(column)[:2] for column in zip(*times, strict=True)
        )
        error = math.hypot(next_shallow - shallow, next_deep - deep)
        return {
            "shallow_ms": shallow,
            "deep_ms": deep,
            "layer_error_ms": error / (self.depths[1] - self.depths[0]),
            "bursts": times,
            "waited": statistics.median(one["waited"] for burst in rounds for one in burst),
        }

    def layer(self, point: dict[str, Any]) -> Time:
        """Milliseconds of one layer."""
        layers = self.depths[1] - self.depths[0]
        difference = max(point["deep_ms"] - point["shallow_ms"], 0.01 * point["deep_ms"])
        return Time(difference / layers, point["layer_error_ms"])

    def end(self) -> None:
        for engine in self.engines:
            engine.end()

    def _settings(self, model: Path, layers: int) -> dict[str, Any]:
        per_token = layers * kv_bytes_per_token(self.config, self.options["dtype"])
        longest = self.options["longest"]
        return {
            "layers": layers,
            "vocabulary": self.config["vocab_size"],
            "engine": {
                "model": str(model), "load_format": "dummy", "dtype": self.options["dtype"],
                "skip_tokenizer_init": True, "max_model_len": longest,
                "tensor_parallel_size": self.tp, "enable_prefix_caching": True,
                "kv_cache_memory_bytes": math.ceil(SLACK * self.kv_tokens * per_token / self.tp),
                "max_num_batched_tokens": self.options["step_tokens"],
                "max_num_seqs": self.options["sequences"], "disable_log_stats": True,
                **self.options["more"],
            },
        }  # fmt: skip

    def _environment(self) -> dict[str, str]:
        bind = "|".join(self.options["cores"][: self.tp])
        return {
            "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CPU_OMP_THREADS_BIND": bind, "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip


def kv_bytes_per_token(config: dict[str, Any], dtype: str) -> int:
    """Of one layer."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    size = 4 if dtype == "float32" else 2
    return int(2 * (config.get("num_key_value_heads") or heads) * width * size)


def _question(kind: str, batch: int, tokens: int, context: int) -> dict[str, Any]:
    if kind == "decode":
        return {"do": "decode", "batch": batch, "context": context, "steps": STEPS}
    if kind == "prefill":
        return {
            "do": "prefill", "batch": batch, "tokens": tokens, "context": context,
            "repeats": REPEATS,
        }  # fmt: skip
    return {
        "do": "mixed", "batch": batch, "context": context, "tokens": tokens - batch,
        "repeats": REPEATS,
    }  # fmt: skip

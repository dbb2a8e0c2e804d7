"""What executor/profiler writes, made up: times that follow known laws."""

from __future__ import annotations

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 512,
    "num_hidden_layers": 3,
}  # fmt: skip
OVERHEAD_MS, REDUCE_MS = 0.8, 0.05


def layer_ms(kind: str, batch: int, tokens: int, context: int) -> float:
    if kind == "decode":
        return 0.5 + 0.02 * batch + 2e-4 * batch * context
    each = tokens / batch
    return 0.5 + 0.02 * tokens + batch * 3e-5 * (each * context + each * each / 2)


def measurements(tp: int = 1, **changes: object) -> dict[str, object]:
    """What the profiler writes, made up: layers as above, a rest of 1 ms, two all-reduces."""
    keys = [("decode", b, b, c) for b in (1, 4, 16) for c in (32, 128, 512)]
    keys += [("prefill", 1, n, c) for n in (16, 64, 256) for c in (0, 256)]
    keys += [("prefill", 4, 256, 0)]
    points = []
    for kind, batch, tokens, context in keys:
        ms = layer_ms(kind, batch, tokens, context) + (2 * REDUCE_MS if tp > 1 else 0.0)
        points.append(
            {"tp": tp, "kind": kind, "batch": batch, "tokens": tokens, "context": context,
             "shallow_ms": 1.0 + ms, "deep_ms": 1.0 + 3 * ms, "layer_error_ms": 0.0}
        )  # fmt: skip
    reduces = [{"tp": 2, "bytes": 2**n, "ms": REDUCE_MS} for n in (10, 24)] if tp > 1 else []
    run = {
        "layers": 3, "tp": tp, "concurrency": 1, "prompt": 64, "output": 32, "requests": 6,
        "tpot_ms": 3 * layer_ms("decode", 1, 1, 80) + 0.1 + OVERHEAD_MS, "ttft_ms": 9.0,
        "throughput_rps": 10.0,
    }  # fmt: skip
    return {
        "format": "coral-measurements-1", "config": CONFIG, "dtype": "float32", "backend": "vllm",
        "depths": [1, 3], "rates": {"tflops": 0.1, "memory_gbyte_per_s": 12.0},
        "machine": {
            "device": "cpu", "name": "Some Processor", "count": 2, "driver": "Linux 6",
            "torch": "2.13.0", "vllm": "0.32.0", "python": "3.11.1", "cores": ["0", "1"],
            "measured_at": "2026-11-30T00:00:00+00:00", "memory_gib": 16.0,
            "compute_capability": 0.0, "power_w": 0.0,
        },
        "points": points, "head": [{"tp": tp, "rows": n, "ms": 0.1} for n in (1, 16)],
        "links": {"all_reduce": reduces, "hop": [{"bytes": 1024, "ms": 0.1},
                                                 {"bytes": 2**20 + 1024, "ms": 1.1}]},
        "serving": [run], "complete": True, **changes,
    }  # fmt: skip

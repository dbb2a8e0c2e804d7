"""Tables of one layer against a real engine with twice as many layers, on this machine's cores.

    python -m bench.profile --json

Profiles a small Llama and a small mixture of experts (float32, one core) as `coral profile run`
does: layers from the difference of engine steps at 1 and 3 layers, the engine's overhead from a
short run at 3 layers. Then predicts TPOT and throughput of a real vLLM with 6 layers of the same
model and runs that: closed loops over requests in flight, prompt and output. `layer_share` is the
layers' part of a decode step at 3 layers; `waited_share` the part of a run in which the engine's
thread waited for a core that others had (taken off, see executor/profiler/waiting.py). Every real
run is made twice and the faster counts, as the fastest of five bursts does in the profile;
`all_runs_*` are the errors against all runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from planner.perf.model import family_of
from planner.perf.overhead import EnginePoint, fit_engine_overhead
from planner.perf.serving import Loop, loop_figures
from planner.types import Link, NodeClass
from tasks.profile_file import read_measurements
from tasks.profile_run import ProfileRequest, run_profiler
from tasks.profile_tables import Profile, performance_of, profile_of, with_layers

SHAPE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 512, "num_hidden_layers": 3,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "torch_dtype": "float32", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "moe": {
        **SHAPE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
POINTS = tuple(
    (in_flight, prompt, output)
    for in_flight in (1, 4, 8, 16)
    for prompt, output in ((64, 32), (128, 64), (256, 32))
)
TIMES = 2  # as many layers


@dataclass(frozen=True)
class Point:
    """One closed loop of the deep model, predicted and real."""

    model: str
    in_flight: int
    prompt: int
    output: int
    tpot_ms: float
    predicted_tpot_ms: float
    throughput_rps: float
    predicted_rps: float
    waited_share: float
    all_tpot_ms: tuple[float, ...]
    all_rps: tuple[float, ...]

    @property
    def tpot_error(self) -> float:
        return abs(self.predicted_tpot_ms / self.tpot_ms - 1.0)

    @property
    def throughput_error(self) -> float:
        return abs(self.predicted_rps / self.throughput_rps - 1.0)


@dataclass(frozen=True)
class Measured:
    """One model: its profile and the real runs."""

    profile: Profile
    profile_s: float
    overhead_ms: float
    layer_share: float
    points: tuple[Point, ...]


def measure(name: str, python: str | None, minutes: float, folder: Path) -> Measured:
    """Profile, then run the deep model."""
    config = MODELS[name]
    request = ProfileRequest(
        config, name, python, device="cpu", backend="vllm", dtype="float32", minutes=minutes
    )
    started = time.perf_counter()
    found = read_measurements(run_profiler(request, folder / f"{name}.json"))
    profile = profile_of(found, name, found.gpu("CPU"))
    spent = time.perf_counter() - started
    print(f"{name}: {profile.rows} points in {spent:.0f} s", file=sys.stderr)
    family = family_of(profile.gpu)
    overhead = fit_engine_overhead(
        [EnginePoint(family, p.measured_tpot_ms, p.predicted_tpot_ms) for p in profile.engine]
    )[family]
    layers = TIMES * config["num_hidden_layers"]
    deep = ProfileRequest(
        {**config, "num_hidden_layers": layers}, name, python, device="cpu", backend="vllm",
        dtype="float32", serve_only=POINTS,
    )  # fmt: skip
    real = read_measurements(run_profiler(deep, folder / f"{name}-deep.json"))
    node = NodeClass("CPU x1", profile.gpu, 1, Link.PCIE, 1.0, 1.0)
    rows = {size: table.rows for size, table in profile.tables.items()}
    performance = performance_of(profile.gpu, profile.model, rows, profile.all_reduce)
    points = []
    for run in real.serving:
        loop = Loop(run.concurrency, run.prompt, run.output)
        said = loop_figures(
            performance, with_layers(profile.model, layers), node, 1, loop, overhead
        )
        points.append(
            Point(name, run.concurrency, run.prompt, run.output, run.tpot_ms, said.tpot_ms,
                  run.throughput_rps, said.throughput_rps, run.waited,
                  run.all_tpot_ms, run.all_throughput_rps)
        )  # fmt: skip
    share = loop_figures(performance, profile.model, node, 1, Loop(4, 64, 32), overhead).layer_share
    return Measured(profile, spent, overhead, share, tuple(points))


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--minutes", type=float, default=4.5, help="for the profile of one model")
    parser.add_argument("--python", help="interpreter with vLLM [.venv-vllm]")
    parser.add_argument("--folder", type=Path, help="keep the files, and go on with what is there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        found = {
            name: measure(name, options.python, options.minutes, folder) for name in options.models
        }
    points = [point for one in found.values() for point in one.points]
    result = {
        **_errors(points),
        "models": {
            name: {
                **_errors(one.points),
                "profile_s": round(one.profile_s, 1),
                "profile_points": one.profile.rows,
                "layer_share": round(one.layer_share, 3),
                "overhead_ms": round(one.overhead_ms, 3),
            }
            for name, one in found.items()
        },
        "waited_share": round(float(np.median([p.waited_share for p in points])), 3),
        "machine": next(iter(found.values())).profile.source,
        "rows": [
            {key: round(v, 3) if isinstance(v, float) else v for key, v in asdict(point).items()}
            for point in points
        ],
    }
    if options.json:
        print(json.dumps(result))
        return
    for point in points:
        print(
            f"{point.model} {point.in_flight} x ({point.prompt} + {point.output}): TPOT "
            f"{point.tpot_ms:.2f} ms, predicted {point.predicted_tpot_ms:.2f}; "
            f"{point.throughput_rps:.3f} requests/s, predicted {point.predicted_rps:.3f}"
        )
    print("\n".join(f"{key}: {value}" for key, value in result.items() if key != "rows"))


def _errors(points: list[Point] | tuple[Point, ...]) -> dict[str, Any]:
    tpot = [100.0 * point.tpot_error for point in points]
    throughput = [100.0 * point.throughput_error for point in points]
    return {
        "points": len(points),
        "tpot_error_median_pct": round(float(np.median(tpot)), 2),
        "throughput_error_median_pct": round(float(np.median(throughput)), 2),
        "all_runs_tpot_error_median_pct": _median_pct(
            [p.predicted_tpot_ms / ms - 1.0 for p in points for ms in p.all_tpot_ms]
        ),
        "all_runs_throughput_error_median_pct": _median_pct(
            [p.predicted_rps / rps - 1.0 for p in points for rps in p.all_rps]
        ),
        "tpot_error_p90_pct": round(float(np.percentile(tpot, 90)), 2),
        "throughput_error_p90_pct": round(float(np.percentile(throughput, 90)), 2),
    }


def _median_pct(errors: list[float]) -> float:
    return round(100.0 * float(np.median(np.abs(errors))), 2)


if __name__ == "__main__":
    main()

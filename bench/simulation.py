"""The simulator: how fast it is, and how near to measured vLLM.

    python -m bench.simulation --json --requests 100000

(a) Every measured H100, H200 and B200 point of the seed's `split = test` rows (none of which any
factor was fitted on) as a closed loop: `concurrency` requests in flight, ten rounds of them, vLLM's
default of 8192 new tokens a step on such cards (an assumption: the points do not say). The first
round is cut to random outputs and not measured: equal requests that start together would stay
together, which the measured times to first token show they did not. Mean TPOT and output tokens/s
between the ends of the second and the ninth round against the measured ones. Speed: a fleet of 200
engines at a share of the rate at which it would be full. Plan capacity: what a scenario's plan is
planned to serve against what its replicas serve in simulation (`bench/plan_capacity.py`).
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

import catalog.seed
from bench.plan_capacity import plan_capacity
from catalog import reads
from catalog.seed import import_seed
from catalog.store import Catalog
from planner.known import Known
from planner.perf.model import PerformanceModel
from planner.placement.settings import PlacementSettings
from planner.types import (
    Lengths,
    Link,
    ModelSpec,
    NodeClass,
    Phase,
    Placement,
    Slo,
    Stage,
    StageNode,
    Workload,
)
from simulator.fleet import Engine, Site, replica_engines
from simulator.measures import tpot_ms
from simulator.run import Result, simulate
from simulator.streams import steady_trace
from simulator.trace import Trace
from tasks.inputs import performance_model, read_known

ROUNDS = 10  # requests of a closed loop, per place
TOKEN_BUDGET = 8192
# The points say no dtype; Llama's are 8-bit: on one H200 its 16-bit weights do not fit, and on two
# H100 they alone take longer to read than the whole measured step.
FP8_SAME_SHAPE = {"meta-llama/Llama-3.1-70B": "meta-llama/Llama-3.3-70B-Instruct"}
SPEED_MODEL, SPEED_NODE, SPEED_BATCH = "Qwen/Qwen3-14B", "H100 x1", 64


@dataclass(frozen=True, slots=True)
class Error:
    """Relative errors of one measured point; positive: simulated is larger."""

    system: str
    model: str
    tpot: float
    ttft: float
    tokens_per_s: float


def main() -> None:
    """Parse, run both parts, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000, help="of the speed run")
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--load", type=float, default=0.6, help="share of the full rate")
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--plan", help="a scenario whose plan's capacity is measured: core")
    parser.add_argument("--home", help="a Coral home whose library is used for that")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    known, performance = shipped()
    errors = list(measured_points(known, performance))
    found: dict[str, object] = {"vllm_points": summarise(errors)}
    if not options.skip_speed:
        found["speed"] = speed(known, performance, options.requests, options.engines, options.load)
    if options.plan:
        found["plan_capacity"] = plan_capacity(options.plan, options.home)
    print(json.dumps(found, indent=None if options.json else 2))


def shipped() -> tuple[Known, PerformanceModel]:
    """The seed's facts."""
    with tempfile.TemporaryDirectory() as home:
        shelf = Catalog(Path(home))
        with shelf.write() as connection:
            import_seed(connection)
        with shelf.read() as connection:
            return read_known(connection), performance_model(reads.read_performance(connection))


def measured_points(known: Known, performance: PerformanceModel) -> Iterator[Error]:
    """Errors of all test points whose model and card the catalog has."""
    path = Path(catalog.seed.__file__).parent / "seed" / "measured_vllm_points.csv"
    for row in pl.read_csv(path).filter(pl.col("split") == "test").iter_rows(named=True):
        model = point_model(known, row["model"])
        gpu = row["system"].split("_")[0].upper()
        result = closed_loop(known, performance, model, gpu, row)
        tpot, ttft, rate = steady_figures(result, row["concurrency"])
        yield Error(
            gpu,
            row["model"],
            tpot / row["measured_tpot_ms"] - 1.0,
            ttft / row["measured_ttft_ms"] - 1.0,
            rate / row["measured_tok_s"] - 1.0,
        )


def point_model(known: Known, name: str) -> ModelSpec:
    """The model of a measured point, in the dtype in which it was served."""
    if name not in FP8_SAME_SHAPE:
        return known.models[name]
    model = known.models[FP8_SAME_SHAPE[name]]
    return replace(model, dtype="fp8", weight_bytes=1.0, bytes_per_layer=model.bytes_per_layer // 2)


def closed_loop(
    known: Known, performance: PerformanceModel, model: ModelSpec, gpu: str, row: Mapping[str, int]
) -> Result:
    """All requests queue at once before an engine that runs `concurrency` of them."""
    tp, places = row["tp"], row["concurrency"]
    node = NodeClass(f"{gpu} x{tp}", known.gpus[gpu], tp, Link.NVSWITCH, 100.0, 100.0)
    (engine,) = single_engines(performance, model, node, tp, places, row["isl"], row["osl"])
    whole = np.ones(ROUNDS * places, dtype=np.int64)
    outputs = whole * row["osl"]
    outputs[:places] = np.random.default_rng(0).integers(1, row["osl"] + 1, places)
    trace = Trace(("w",), np.zeros(whole.size), whole * 0, whole * row["isl"], outputs)
    return simulate([engine], trace, performance)


def steady_figures(result: Result, places: int) -> tuple[float, float, float]:
    """Mean TPOT and median TTFT (from the start, as nobody queues in a closed loop) in ms, and
    output tokens/s, of what ends between the second and the ninth round."""
    ends = np.sort(result.finish_ms)
    first, last = ends[2 * places - 1], ends[(ROUNDS - 1) * places - 1]
    inside = (result.finish_ms > first) & (result.finish_ms <= last)
    inside[:places] = False
    tokens = result.trace.output_tokens[inside].sum()
    ttft = np.median((result.first_ms - result.start_ms)[inside])
    return (
        float(tpot_ms(result)[inside].mean()),
        float(ttft),
        float(tokens) * 1e3 / float(last - first),
    )


def single_engines(
    performance: PerformanceModel,
    model: ModelSpec,
    node: NodeClass,
    tp: int,
    places: int,
    mean_input: float,
    mean_output: float,
) -> list[Engine]:
    """Aggregated engines of one node with vLLM's default token budget."""
    lengths = Lengths("b", mean_input, mean_output, mean_input, mean_output)
    workload = Workload("w", model, model.dtype, Slo(1e6, 1e6), lengths, 1.0)
    part = StageNode(node.name, tp, node.gpu_count // tp, places)
    placement = Placement((Stage(0, model.layers, (part,)),), 1, places, 1.0, 1.0, 1.0)
    site = Site(performance, {node.name: node}, PlacementSettings())
    engines = replica_engines("r", Phase.AGGREGATED, placement, workload, "here", {"w": 1.0}, site)
    return [
        replace(engine, token_budget=TOKEN_BUDGET, most_requests=places, step_requests=places)
        for engine in engines
    ]


def summarise(errors: list[Error]) -> dict[str, object]:
    """Median and p90 of |error| by card, and the median signed TPOT error by card and model."""
    groups: dict[str, list[Error]] = defaultdict(list)
    for error in errors:
        groups[error.system].append(error)
        if error.system != "B200":
            groups["H100 and H200"].append(error)
        groups[f"{error.system} {error.model}"].append(error)
    return {
        name: {
            "points": len(group),
            "tpot_median": _quantile([abs(e.tpot) for e in group], 0.5),
            "tpot_p90": _quantile([abs(e.tpot) for e in group], 0.9),
            "tpot_median_signed": _quantile([e.tpot for e in group], 0.5),
            "ttft_median": _quantile([abs(e.ttft) for e in group], 0.5),
            "ttft_median_signed": _quantile([e.ttft for e in group], 0.5),
            "tokens_per_s_median": _quantile([abs(e.tokens_per_s) for e in group], 0.5),
            "tokens_per_s_p90": _quantile([abs(e.tokens_per_s) for e in group], 0.9),
        }
        for name, group in sorted(groups.items())
    }


def speed(
    known: Known, performance: PerformanceModel, requests: int, count: int, load: float
) -> dict[str, float]:
    """Requests and steps per second of this machine, on one core."""
    node = next(item.node for item in known.instance_types if item.node.name == SPEED_NODE)
    lengths = known.lengths["azure2023_conv"]
    model = known.models[SPEED_MODEL]
    workload = Workload("w", model, model.dtype, Slo(2000.0, 80.0), lengths, 1.0)
    (one,) = single_engines(
        performance, model, node, 1, SPEED_BATCH, lengths.mean_input, lengths.mean_output
    )
    full = simulate([one], steady_trace([workload], {"w": 100.0}, 0.3, 1), performance)
    full_rps = full.trace.requests / full.end_s
    engines = [replace(one, name=f"r{k}") for k in range(count)]
    rate = load * full_rps * count
    trace = steady_trace([workload], {"w": rate}, requests / rate / 60.0, 0)
    result = simulate(engines, trace, performance)
    return {
        "requests": trace.requests,
        "engines": count,
        "offered_rps": round(rate, 1),
        "simulated_s": round(result.end_s, 1),
        "wall_s": round(result.wall_s, 2),
        "requests_per_s": round(trace.requests / result.wall_s),
        "iterations_per_s": round(result.iterations / result.wall_s),
        "tokens_per_s": round(result.scheduled_tokens / result.wall_s),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def _quantile(values: list[float], q: float) -> float:
    return round(float(np.quantile(values, q)), 4)


if __name__ == "__main__":
    main()

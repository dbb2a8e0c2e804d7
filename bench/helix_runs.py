"""Helix's published runs of its real system on one cluster of 24 machines, in simulation.

    python -m bench.helix_runs --json

Layouts, layer times, KV room and results are Helix's (`bench/data/helix`); what is simulated are
the runs whose layout is a pipeline of stages on one or more machines each: those of `separate`,
`swarm`, and of `helix` on one type. Helix's layout of 70B over all types, in which machines share
parts of their layers, is not one that Coral's engines have.

A run `offline` keeps so many requests in flight; where Helix's scheduler admits by KV (80% of the
tightest machine's), as many as that holds at the mean prompt and the length-biased mean output of
requests in flight. A run `online` gets Poisson requests at the rate that was offered (Helix replays
the Azure conversation trace's arrivals; which part of it is not known). Prompts and outputs are
those of that trace up to 2048 and 1024 tokens. Throughput is output tokens between the same
seconds of the run as Helix counts.

Twice: with the layer times alone, and with an overhead of every step per machine type, fitted on
the three `separate` offline runs and tested on the others. Online runs are means over seeds: a few
dozen requests end in one.

Assumed: as many micro-batches in flight as stages, each of equal size; a step with prompts and
decodes takes the sum of both, since Helix's workers run them in steps of their own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from bench.peer_data import DATA, MODELS
from catalog.requests import read_arrivals
from planner.perf.allreduce import AllReduce
from planner.perf.model import PerformanceModel
from planner.perf.tables import LayerRow
from planner.types import GpuSpec, Link, ModelSpec, NodeClass, Phase
from simulator.fleet import Engine, EngineStage, Lane
from simulator.kernels.types import BLOCK_TOKENS
from simulator.run import Result, simulate
from simulator.tables import GroupKind
from simulator.trace import Trace

HELIX = DATA / "helix"
LONGEST_INPUT, LONGEST_OUTPUT = 2048, 1024  # Helix leaves longer requests out
KV_SHARE = 0.8  # at which Helix's scheduler stops admitting
LINK_BYTES_PER_MS, LINK_LATENCY_MS = 1e6, 1.0
PROMPTS_PER_STEP = 1
SEEDS = 10  # of online runs
OFFLINE_ROUNDS = 30  # requests queued, per place
TINY_MS = 1e-9  # tables hold no zeros
CHAIN_WINDOW_S = (60.0, 660.0)  # as Helix's simulator counts
# (machine, layers, how many in a row); output tokens/s of Helix's simulator, run on its own code.
CHAINS = (
    ("70B, 24 stages: A100 8, L4 3, T4 2 layers", "llama2-70b",
     (("A100", 8, 4), ("L4", 3, 8), ("T4", 2, 12)), 222.0),
    ("70B, 16 stages: A100 10, L4 4, T4 2", "llama2-70b",
     (("A100", 10, 4), ("L4", 4, 8), ("T4", 2, 4)), 200.9),
    ("70B, 10 stages: A100 12 and 8, L4 6", "llama2-70b",
     (("A100", 12, 3), ("A100", 8, 1), ("L4", 6, 6)), 175.7),
    ("30B, 10 stages: T4 6, L4 6", "llama1-30b", (("T4", 6, 2), ("L4", 6, 8)), 52.7),
    ("30B, 10 stages: T4 6", "llama1-30b", (("T4", 6, 10),), 40.9),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One published run."""

    model: str
    method: str
    sub_cluster: str | None
    mode: str
    in_flight: int | None
    offered_tokens_per_s: float | None
    from_s: float
    until_s: float

    @property
    def layout(self) -> str:
        return self.method if self.sub_cluster is None else f"{self.method}_{self.sub_cluster}"


def main() -> None:
    """Simulate all runs, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(json.dumps(helix_runs(), indent=None if options.json else 2))


def helix_runs() -> dict[str, object]:
    """Rows of every run, sums over sub-clusters beside Helix's own simulator, and their errors."""
    runs = [Run(*row) for row in pl.read_csv(HELIX / "helix_runs.csv").iter_rows()]
    results = pl.read_csv(HELIX / "helix_results.csv", infer_schema_length=None)
    performance = helix_performance()
    fitted = fit_overhead(runs, results, performance)
    rows = []
    for run in runs:
        measured = _published(results, run, "prototype")
        found = {
            "plain": simulated_tokens_per_s(run, performance, {}),
            "fitted": simulated_tokens_per_s(run, performance, fitted),
        }
        rows.append({"run": run, "measured": measured, **found})
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["run"].model, row["run"].method, row["run"].mode), []).append(row)
    sums = []
    for (model, method, mode), mine in groups.items():
        measured = sum(row["measured"] for row in mine)
        whole = Run(model, method, None, mode, None, None, 0.0, 0.0)
        sums.append(
            {
                "runs": f"{model} {method} {mode}",
                "measured_tokens_per_s": round(measured, 1),
                "helix_simulator": _error(_published(results, whole, "simulation"), measured),
                **{k: _error(sum(row[k] for row in mine), measured) for k in ("plain", "fitted")},
                "fitted_on": any(_is_fitted(row["run"]) for row in mine),
            }
        )
    test = [row for row in rows if not _is_fitted(row["run"])]
    return {
        "overhead_ms": {name: round(ms, 2) for name, ms in fitted.items()},
        "runs": [
            {
                "run": f"{row['run'].model} {row['run'].layout} {row['run'].mode}",
                "measured_tokens_per_s": row["measured"],
                **{k: _error(row[k], row["measured"]) for k in ("plain", "fitted")},
                "fitted_on": _is_fitted(row["run"]),
            }
            for row in rows
        ],
        "sums": sums,
        "pipelines": chains(performance, fitted),
        "errors": {
            "runs, plain": _quantiles([_error(r["plain"], r["measured"]) for r in rows]),
            "test runs, fitted": _quantiles([_error(r["fitted"], r["measured"]) for r in test]),
            "sums, plain": _quantiles([r["plain"] for r in sums]),
            "test sums, fitted": _quantiles([r["fitted"] for r in sums if not r["fitted_on"]]),
            "sums, Helix's simulator": _quantiles([r["helix_simulator"] for r in sums]),
        },
    }


def fit_overhead(
    runs: Sequence[Run], results: pl.DataFrame, performance: PerformanceModel
) -> dict[str, float]:
    """Milliseconds of every step by machine type, so that the `separate` offline runs are met."""
    found = {}
    for run in runs:
        if not _is_fitted(run):
            continue
        measured, machine = _published(results, run, "prototype"), (run.sub_cluster or "").upper()
        low, high = 0.0, 40.0
        for _ in range(8):
            middle = (low + high) / 2.0
            slow = simulated_tokens_per_s(run, performance, {machine: middle}) < measured
            low, high = (low, middle) if slow else (middle, high)
        found[machine] = (low + high) / 2.0
    return found


def _is_fitted(run: Run) -> bool:
    return run.method == "separate" and run.mode == "offline"


def _error(value: float, measured: float) -> float:
    return round(value / measured - 1.0, 4)


def _published(results: pl.DataFrame, run: Run, kind: str) -> float:
    """Output tokens/s; of the authors' first record of that run."""
    where = (
        (pl.col("cluster") == "cluster24")
        & (pl.col("kind") == kind)
        & (pl.col("model") == run.model)
        & (pl.col("method") == run.method)
        & (pl.col("mode") == run.mode)
        & pl.col("sub_cluster").eq_missing(pl.lit(run.sub_cluster))
    )
    return float(results.filter(where)["decode_tokens_per_s"][0])


def simulated_tokens_per_s(
    run: Run, performance: PerformanceModel, overhead_ms: Mapping[str, float]
) -> float:
    """Output tokens/s of the window; tokens of a request are spread evenly between its ends."""
    inputs, outputs = lengths()
    engine = pipeline(run, overhead_ms)
    found = []
    for seed in range(1 if run.mode == "offline" else SEEDS):
        rng = np.random.default_rng(seed)
        if run.mode == "offline":
            arrival = np.zeros(OFFLINE_ROUNDS * engine.most_requests)
        else:
            rate = (run.offered_tokens_per_s or 0.0) / float(inputs.mean() + outputs.mean())
            arrival = np.cumsum(rng.exponential(1.0 / rate, int(2 * rate * run.until_s) + 10))
            arrival = arrival[arrival < run.until_s]
        which = rng.integers(0, inputs.size, arrival.size)
        place = np.zeros(arrival.size, dtype=np.int64)
        trace = Trace(("w",), arrival, place, inputs[which], outputs[which])
        result = simulate([engine], trace, performance)
        found.append(tokens_between(result, run.from_s, run.until_s))
    return float(np.mean(found))


def tokens_between(result: Result, from_s: float, until_s: float) -> float:
    begin, end = 1e3 * from_s, 1e3 * until_s
    first = np.where(result.first_ms < 0.0, np.inf, result.first_ms)
    last = np.where(result.finish_ms < 0.0, np.inf, result.finish_ms)
    span = np.maximum(last - first, 1e-9)
    inside = np.clip(np.minimum(last, end) - np.maximum(first, begin), 0.0, None)
    share = np.where(np.isfinite(first), inside / span, 0.0)
    return float((share * result.trace.output_tokens).sum()) / (until_s - from_s)


def pipeline(run: Run, overhead_ms: Mapping[str, float]) -> Engine:
    """The layout as one engine: a stage per layer range, a lane per machine."""
    layouts = pl.read_csv(HELIX / "helix_layouts.csv").filter(
        (pl.col("cluster") == "cluster24")
        & (pl.col("model") == run.model)
        & (pl.col("method") == run.layout)
        & (pl.col("num_layers") > 0)
    )
    ranges = sorted(set(layouts.select("start_layer", "end_layer").iter_rows()))
    stages = [
        (end - start, layouts.filter(pl.col("start_layer") == start)["machine"].to_list())
        for start, end in ranges
    ]
    return stages_engine(run.layout, run.model, stages, run.in_flight, overhead_ms)


def stages_engine(
    name: str,
    model: str,
    layout: Sequence[tuple[int, Sequence[str]]],
    in_flight: int | None,
    overhead_ms: Mapping[str, float],
) -> Engine:
    """Stages of (layers, machines); without `in_flight` as many requests as 80% of the KV holds."""
    kv = {
        (machine, layers): tokens
        for known, machine, layers, tokens in pl.read_csv(HELIX / "helix_kv.csv")
        .select("model", "machine", "num_layers", "kv_tokens")
        .iter_rows()
        if known == model
    }
    inputs, outputs = lengths()
    stages, room = [], []
    for place, (layers, machines) in enumerate(layout):
        tokens = [kv[machine, layers] for machine in machines]
        room.append(sum(tokens))
        lanes = tuple(
            Lane(
                _kind(model, machine),
                overhead_ms.get(machine, 0.0),
                held // BLOCK_TOKENS,
                _speed(model, machine),
            )
            for machine, held in zip(machines, tokens, strict=True)
        )
        stages.append(EngineStage(layers, place == len(layout) - 1, lanes))
    mean = float(inputs.mean()) + _length_biased(outputs)
    requests = in_flight or int(KV_SHARE * min(room) / mean)
    batch = -(-requests // len(stages))
    return Engine(
        name=name,
        phase=Phase.AGGREGATED,
        domain="here",
        weights={"w": 1.0},
        stages=tuple(stages),
        micro_batches=len(stages),
        step_requests=batch,
        most_requests=requests,
        token_budget=batch + PROMPTS_PER_STEP * LONGEST_INPUT,
        hop_latency_ms=LINK_LATENCY_MS,
        hop_ms_per_token=MODELS[model][1] / LINK_BYTES_PER_MS,
    )


def chains(performance: PerformanceModel, fitted: Mapping[str, float]) -> list[dict[str, object]]:
    """Whole-cluster pipelines beside Helix's simulator, which has no prototype run of them."""
    inputs, outputs = lengths()
    found: list[dict[str, object]] = []
    for name, model, parts, theirs in CHAINS:
        layout = [(layers, [machine]) for machine, layers, count in parts for _ in range(count)]
        row: dict[str, object] = {"layout": name, "helix_simulator_tokens_per_s": theirs}
        for kind, overhead in (("plain", {}), ("fitted", fitted)):
            engine = stages_engine(name, model, layout, None, overhead)
            rng = np.random.default_rng(0)
            # They all start at once: enough to keep the pipeline full over the window.
            count = OFFLINE_ROUNDS * engine.most_requests
            which = rng.integers(0, inputs.size, count)
            place = np.zeros(count, dtype=np.int64)
            trace = Trace(("w",), np.zeros(count), place, inputs[which], outputs[which])
            result = simulate([engine], trace, performance)
            row[f"{kind}_tokens_per_s"] = round(tokens_between(result, *CHAIN_WINDOW_S), 1)
        found.append(row)
    return found


def lengths() -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Prompts and outputs of the trace, without those that Helix leaves out."""
    frame = read_arrivals("azure2023_conv").filter(
        (pl.col("input_tokens") <= LONGEST_INPUT) & (pl.col("output_tokens") <= LONGEST_OUTPUT)
    )
    return (
        frame["input_tokens"].to_numpy().astype(np.int64),
        frame["output_tokens"].to_numpy().astype(np.int64),
    )


def _length_biased(outputs: np.ndarray) -> float:  # type: ignore[type-arg]
    """Mean output of the requests that are in flight at some moment."""
    return float((outputs.astype(float) ** 2).sum() / outputs.sum())


def helix_performance() -> PerformanceModel:
    """Helix's times of one layer as tables of one GPU each."""
    rows: dict[tuple[str, str, str, int], list[LayerRow]] = {}
    for model, machine, phase, tokens, ms in pl.read_csv(HELIX / "helix_profiles.csv").iter_rows():
        if tokens == 0:
            continue
        mine = rows.setdefault((model, "fp16", machine, 1), [])
        if phase == "prompt":
            mine.append(LayerRow("prefill", 1, tokens, 0, ms, TINY_MS, TINY_MS, "Helix"))
        else:
            for context in (0, 4096):  # no dependence on it was measured
                row = LayerRow("decode", tokens, tokens, context, TINY_MS, ms, TINY_MS, "Helix")
                mine.append(row)
    return PerformanceModel(rows, {}, AllReduce({}, {}), {})


def _speed(model: str, machine: str) -> float:
    """Share of a stage's requests: by the time of a prompt of 750 tokens, as swarm's router."""
    frame = pl.read_csv(HELIX / "helix_profiles.csv").filter(
        (pl.col("model") == model)
        & (pl.col("machine") == machine)
        & (pl.col("phase") == "prompt")
        & (pl.col("batch_tokens") == 750)
    )
    return 1.0 / float(frame["layer_ms"][0])


def _kind(model: str, machine: str) -> GroupKind:
    layers, activation = MODELS[model]
    spec = ModelSpec(
        name=model, dtype="fp16", layers=layers, hidden=round(activation / 2), heads=1, kv_heads=1,
        head_dim=1, intermediate=1, experts=0, experts_per_token=0, moe_intermediate=0, vocab=1,
        weight_bytes=2.0, expert_weight_bytes=0.0, bytes_per_layer=1, embed_bytes=0,
        lm_head_bytes=0, kv_bytes_per_token_per_layer=4, hop_bytes_per_token=round(activation),
    )  # fmt: skip
    gpu = GpuSpec(machine, machine, 16.0, 300.0, 100.0, 70.0, 8.0)
    return GroupKind(spec, "fp16", NodeClass(f"{machine} x1", gpu, 1, Link.NONE, 8.0, 8.0), 1)


def _quantiles(errors: list[float]) -> dict[str, float]:
    sizes = np.abs(errors)
    return {
        "count": len(errors),
        "median": round(float(np.median(sizes)), 4),
        "p90": round(float(np.quantile(sizes, 0.9)), 4),
        "signed_median": round(float(np.median(errors)), 4),
    }


if __name__ == "__main__":
    main()

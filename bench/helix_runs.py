"""Helix's published runs of its real system on one cluster of 24 machines, in simulation.

    python -m bench.helix_runs --json

Layouts, layer times, KV room and results are Helix's (`bench/data/helix`). Every run is simulated
with machines that batch on their own, as Helix's do (`bench.helix_machines`), and those whose
layout is a pipeline also as an engine of Coral's simulator (`bench.helix_engines`).

A run `offline` keeps so many requests in flight, or, with Helix's own scheduler, starts requests
while the KV set aside for prompts and mean outputs is below 80% in every layer, on machines below
85%. A run `online` gets Poisson requests at the rate that was offered (Helix draws from rates of
the Azure conversation trace), each started when it comes; means over seeds. Prompts and outputs are
those of that trace up to 2048 and 1024 tokens. Counted between the seconds that Helix counts.

Twice: with the layer times alone, and with an overhead of every step per machine type, fitted on
the three `separate` offline runs and tested on the others.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.helix_data import (
    CLUSTER,
    LINK_BYTES_PER_MS,
    LINK_LATENCY_MS,
    Published,
    Run,
    drawn,
    helix_simulated,
    layer_times,
    layout,
    machine_limits,
    measured,
    published_runs,
)
from bench.helix_engines import (
    OFFLINE_ROUNDS,
    engine_tokens_per_s,
    helix_performance,
    is_pipeline,
    stages_engine,
    tokens_between,
)
from bench.helix_machines import Admission, Cluster, Machine, Weights
from bench.peer_data import MODELS, helix_case
from planner.baselines.helix_flow import SINK, SOURCE, link_flows
from planner.perf.model import PerformanceModel
from simulator.run import simulate
from simulator.trace import Trace

SEEDS = 10  # of online runs: a few dozen requests end in one
MEAN_OUTPUT = 240.0  # as Helix's schedulers expect
OFFLINE = Admission(None, MEAN_OUTPUT, layer_share=0.8, machine_share=0.85)
ONLINE = Admission(None, 0.6 * MEAN_OUTPUT, machine_share=0.9, waits=False)
AT_ONCE = Admission(waits=False, machine_share=math.inf)  # online, other schedulers
QUEUED = 3000  # requests of an offline run: more than end in it
MOST_OVERHEAD_MS = 40.0
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

Overheads = Mapping[str, float]  # ms of every step, by machine type


def main() -> None:
    """Simulate all runs, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(json.dumps(helix_runs(), indent=None if options.json else 2))


def helix_runs() -> dict[str, object]:
    """Every run beside the real system, sums over machine types beside Helix's own simulator."""
    runs, performance = published_runs(), helix_performance()
    engines = functools.partial(_engines, performance=performance)
    fitted = fit_overhead(runs, lambda run, overhead: on_machines(run, overhead)[0].tokens_per_s)
    engine_fitted = fit_overhead(runs, engines)
    rows = [_row(run, fitted, engine_fitted, engines) for run in runs]
    test = [row for row in rows if not row["fitted_on"]]
    sums = _sums(rows)
    return {
        "overhead_ms": fitted,
        "engine_overhead_ms": engine_fitted,
        "runs": [{key: row[key] for key in row if key not in ("of", "tokens")} for row in rows],
        "sums": sums,
        "pipelines": chains(performance, fitted, engine_fitted),
        "errors": {
            "throughput": _quantiles(row["machines"] for row in test),
            "throughput, layer times alone": _quantiles(row["plain"] for row in rows),
            "prompt latency": _quantiles(row["prompt"] for row in test),
            "ms per token": _quantiles(row["per_token"] for row in test),
            "engines of Coral": _quantiles(row["engine"] for row in test),
            "sums": _quantiles(row["machines"] for row in sums),
            "sums, Helix's simulator": _quantiles(row["helix_simulator"] for row in sums),
        },
    }


def _row(
    run: Run,
    fitted: Overheads,
    engine_fitted: Overheads,
    engines: Callable[[Run, Overheads], float],
) -> dict[str, Any]:
    """A run's errors; with the overheads unless said."""
    real = measured(run)
    found, spread = on_machines(run, fitted)
    alone, _ = on_machines(run, {})
    engine = engines(run, engine_fitted) if is_pipeline(run) else None
    return {
        "of": run,
        "tokens": (found.tokens_per_s, real.tokens_per_s),
        "run": run.name,
        "measured_tokens_per_s": real.tokens_per_s,
        "plain": _error(alone.tokens_per_s, real.tokens_per_s),
        "machines": _error(found.tokens_per_s, real.tokens_per_s),
        "spread": None if spread is None else round(spread, 3),
        "prompt": _error(found.prompt_ms, real.prompt_ms),
        "per_token": _error(found.per_token_ms, real.per_token_ms),
        "engine": _error(engine, real.tokens_per_s),
        "fitted_on": _is_fitted(run),
    }


def _sums(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Runs of one method on all types of machines, which Helix's simulator did too."""
    groups: dict[tuple[str, str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        run = row["of"]
        key = (run.model, run.method, run.scheduler, run.mode)
        groups.setdefault(key, []).append(row)
    found = []
    for key, mine in groups.items():
        total = sum(row["tokens"][1] for row in mine)
        theirs = helix_simulated(mine[0]["of"])
        if theirs is not None:
            ours = None if mine[0]["fitted_on"] else sum(row["tokens"][0] for row in mine)
            found.append(
                {
                    "runs": " ".join(key),
                    "measured_tokens_per_s": round(total, 1),
                    "machines": None if ours is None else _error(ours, total),
                    "helix_simulator": _error(theirs, total),
                }
            )
    return found


def fit_overhead(
    runs: Sequence[Run], tokens_per_s: Callable[[Run, Overheads], float]
) -> dict[str, float]:
    """Milliseconds of every step by machine type, so that the `separate` offline runs are met."""
    found = {}
    for run in runs:
        if not _is_fitted(run):
            continue
        real, machine = measured(run).tokens_per_s, (run.sub_cluster or "").upper()
        low, high = 0.0, MOST_OVERHEAD_MS
        for _ in range(8):
            middle = (low + high) / 2.0
            slow = tokens_per_s(run, {machine: middle}) < real
            low, high = (low, middle) if slow else (middle, high)
        found[machine] = round((low + high) / 2.0, 2)
    return found


def on_machines(run: Run, overhead_ms: Overheads) -> tuple[Published, float | None]:
    """On machines that batch on their own; and the throughput's deviation between seeds, of it."""
    limits = machine_limits(run.model)
    machines = [
        _machine(node, kind, first, end, limits[kind, end - first])
        for node, kind, first, end in layout(run)
    ]
    weights = _weights(run)
    if run.in_flight is not None:
        admission = Admission(run.in_flight)
    else:
        own = ONLINE if run.scheduler == "maxflow" else AT_ONCE
        admission = own if run.is_online else OFFLINE
    found = []
    for seed in range(SEEDS if run.is_online else 1):
        served = _cluster(run.model, machines, weights, overhead_ms, admission).run(
            *_in_ms(drawn(run, seed, QUEUED)), 1e3 * run.until_s
        )
        found.append(served.within(1e3 * run.from_s, 1e3 * run.until_s))
    means = np.nanmean(found, axis=0)
    spread = float(np.std(found, axis=0, ddof=1)[0] / means[0]) if len(found) > 1 else None
    return Published(*means.tolist()), spread


def _machine(node: str, kind: str, first: int, end: int, limits: Any) -> Machine:
    return Machine(
        node, kind, first, end, limits.kv_tokens, limits.most_prompts, limits.most_prompt_tokens,
        limits.most_decodes,
    )  # fmt: skip


def _weights(run: Run) -> Weights:
    """Of links: flow of a maximum flow, the throughput of the machine ahead, or all alike."""
    case = helix_case(CLUSTER, run.model)
    nodes = case.layouts[run.layout]
    flows = link_flows(nodes, MODELS[run.model][0], case.link)
    if run.scheduler == "maxflow":
        return flows
    speed = {node.node: node.tokens_per_s for node in nodes} | {SINK: 1.0}
    return {link: speed[link[1]] if run.scheduler == "swarm" else 1.0 for link in flows}


def _cluster(
    model: str,
    machines: Sequence[Machine],
    weights: Weights,
    overhead_ms: Overheads,
    admission: Admission,
) -> Cluster:
    times = layer_times(model)

    @functools.cache
    def layer_ms(kind: str, prompts: bool, tokens: int) -> float:
        sizes, ms = times[kind, prompts]
        beyond = max(1.0, tokens / float(sizes[-1]))
        return float(np.interp(tokens, sizes, ms)) * beyond

    def step_ms(kind: str, prompts: bool, tokens: int, layers: int) -> float:
        return layers * layer_ms(kind, prompts, tokens) + overhead_ms.get(kind, 0.0)

    per_token_ms = MODELS[model][1] / LINK_BYTES_PER_MS
    return Cluster(machines, weights, step_ms, LINK_LATENCY_MS, per_token_ms, admission)


def _in_ms(drawn_requests: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    arrival_s, inputs, outputs = drawn_requests
    return 1e3 * arrival_s, inputs, outputs


def _engines(run: Run, overhead_ms: Overheads, performance: PerformanceModel) -> float:
    return engine_tokens_per_s(run, performance, overhead_ms, SEEDS)


def chains(
    performance: PerformanceModel, fitted: Overheads, engine_fitted: Overheads
) -> list[dict[str, object]]:
    """Whole-cluster pipelines beside Helix's simulator; there are no runs of the real system."""
    found: list[dict[str, object]] = []
    for name, model, parts, theirs in CHAINS:
        stages = [(layers, kind) for kind, layers, count in parts for _ in range(count)]
        run = Run(model, "chain", None, "maxflow", "offline", None, None, *CHAIN_WINDOW_S)
        row: dict[str, object] = {"layout": name, "helix_simulator_tokens_per_s": theirs}
        for kind, overhead in (("plain", {}), ("fitted", fitted)):
            machines, weights = _chain(model, stages)
            cluster = _cluster(model, machines, weights, overhead, OFFLINE)
            served = cluster.run(*_in_ms(drawn(run, 0, QUEUED)), 1e3 * run.until_s)
            tokens, _, _ = served.within(1e3 * run.from_s, 1e3 * run.until_s)
            row[f"{kind}_tokens_per_s"] = round(tokens, 1)
        lanes = [(layers, [kind]) for layers, kind in stages]
        engine = stages_engine(name, model, lanes, None, engine_fitted)
        arrival_s, inputs, outputs = drawn(run, 0, OFFLINE_ROUNDS * engine.most_requests)
        place = np.zeros(arrival_s.size, dtype=np.int64)
        trace = Trace(("w",), arrival_s, place, inputs, outputs)
        result = simulate([engine], trace, performance)
        row["engine_tokens_per_s"] = round(tokens_between(result, *CHAIN_WINDOW_S), 1)
        found.append(row)
    return found


def _chain(model: str, stages: Sequence[tuple[int, str]]) -> tuple[list[Machine], Weights]:
    limits, machines, first = machine_limits(model), [], 0
    for place, (layers, kind) in enumerate(stages):
        end = first + layers
        machines.append(_machine(str(place), kind, first, end, limits[kind, layers]))
        first = end
    names = [SOURCE, *(machine.name for machine in machines), SINK]
    return machines, dict.fromkeys(itertools.pairwise(names), 1.0)


def _is_fitted(run: Run) -> bool:
    return run.method == "separate" and not run.is_online


def _error(value: float | None, real: float | None) -> float | None:
    """Relative; None where either is not known."""
    return None if value is None or real is None else round(value / real - 1.0, 4)


def _quantiles(errors: Iterable[float | None]) -> dict[str, float]:
    known = np.array([error for error in errors if error is not None])
    return {
        "count": known.size,
        "median": round(float(np.median(np.abs(known))), 4),
        "p90": round(float(np.quantile(np.abs(known), 0.9)), 4),
        "signed_median": round(float(np.median(known)), 4),
    }


if __name__ == "__main__":
    main()

"""Helix's published runs, layouts, layer times and KV room: `bench/data/helix`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from bench.peer_data import DATA
from catalog.requests import read_arrivals

HELIX = DATA / "helix"
CLUSTER = "cluster24"
LONGEST_INPUT, LONGEST_OUTPUT = 2048, 1024  # Helix leaves longer requests out
LINK_BYTES_PER_MS, LINK_LATENCY_MS = 1e6, 1.0

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """One published run of the real system."""

    model: str
    method: str
    sub_cluster: str | None
    scheduler: str
    mode: str
    in_flight: int | None
    offered_tokens_per_s: float | None  # prompt and output tokens
    from_s: float
    until_s: float

    @property
    def layout(self) -> str:
        return self.method if self.sub_cluster is None else f"{self.method}_{self.sub_cluster}"

    @property
    def name(self) -> str:
        return f"{self.model} {self.layout} {self.scheduler} {self.mode}"

    @property
    def is_online(self) -> bool:
        return self.mode == "online"


@dataclass(frozen=True, slots=True)
class Published:
    """What a run was measured at; latencies from coordinator to coordinator."""

    tokens_per_s: float  # output
    prompt_ms: float | None
    per_token_ms: float | None


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """KV room and limits of a step of a machine with so many layers."""

    kv_tokens: int
    most_prompts: int
    most_prompt_tokens: int
    most_decodes: int


def published_runs() -> list[Run]:
    """Those whose requests in flight or offered rate are known."""
    return [Run(*row) for row in pl.read_csv(HELIX / "helix_runs.csv").iter_rows()]


@functools.cache
def _results() -> pl.DataFrame:
    results = pl.read_csv(HELIX / "helix_results.csv", infer_schema_length=None)
    return results.filter(pl.col("cluster") == CLUSTER)


def measured(run: Run) -> Published:
    """The authors' first record of that run of the real system."""
    found = _results().filter(_same(run) & (pl.col("kind") == "prototype"))
    row = found.row(0, named=True)
    return Published(
        row["decode_tokens_per_s"],
        _ms(row["prompt_latency_mean_s"]),
        _ms(row["decode_latency_mean_s"]),
    )


def helix_simulated(run: Run) -> float | None:
    """Output tokens/s that Helix's own simulator says of the run, over all types of machines."""
    whole = Run(run.model, run.method, None, run.scheduler, run.mode, None, None, 0.0, 0.0)
    found = _results().filter(_same(whole) & (pl.col("kind") == "simulation"))
    return float(found["decode_tokens_per_s"][0]) if found.height else None


def _same(run: Run) -> pl.Expr:
    return (
        (pl.col("model") == run.model)
        & (pl.col("method") == run.method)
        & (pl.col("mode") == run.mode)
        & (pl.col("scheduler") == run.scheduler)
        & pl.col("sub_cluster").eq_missing(pl.lit(run.sub_cluster))
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


@functools.cache
def lengths() -> tuple[Ints, Ints]:
    """Prompts and outputs of the Azure conversation trace, without those that Helix leaves out."""
    frame = read_arrivals("azure2023_conv").filter(
        (pl.col("input_tokens") <= LONGEST_INPUT) & (pl.col("output_tokens") <= LONGEST_OUTPUT)
    )
    return (
        frame["input_tokens"].to_numpy().astype(np.int64),
        frame["output_tokens"].to_numpy().astype(np.int64),
    )


def drawn(run: Run, seed: int, queued: int) -> tuple[Floats, Ints, Ints]:
    """Arrivals in s (Poisson at the offered rate; offline so many at once), prompts and outputs."""
    inputs, outputs = lengths()
    rng = np.random.default_rng(seed)
    if run.offered_tokens_per_s is None:
        arrival_s = np.zeros(queued)
    else:
        rate = run.offered_tokens_per_s / float(inputs.mean() + outputs.mean())
        arrival_s = np.cumsum(rng.exponential(1.0 / rate, int(2 * rate * run.until_s) + 10))
        arrival_s = arrival_s[arrival_s < run.until_s]
    which = rng.integers(0, inputs.size, arrival_s.size)
    return arrival_s, inputs[which], outputs[which]


def layout(run: Run) -> list[tuple[str, str, int, int]]:
    """Node, machine type, first layer and end of every machine that the layout uses."""
    frame = pl.read_csv(HELIX / "helix_layouts.csv").filter(
        (pl.col("cluster") == CLUSTER)
        & (pl.col("model") == run.model)
        & (pl.col("method") == run.layout)
        & (pl.col("num_layers") > 0)
    )
    return [
        (str(node), machine, first, end)
        for node, machine, first, end in frame.select(
            "node_id", "machine", "start_layer", "end_layer"
        ).iter_rows()
    ]


@functools.cache
def machine_limits(model: str) -> dict[tuple[str, int], MachineLimits]:
    """By machine type and layers that it holds."""
    frame = pl.read_csv(HELIX / "helix_kv.csv").filter(pl.col("model") == model)
    columns = (
        "machine", "num_layers", "kv_tokens", "prompt_max_requests", "prompt_max_tokens",
        "decode_max_requests",
    )  # fmt: skip
    return {
        (machine, layers): MachineLimits(*limits)
        for machine, layers, *limits in frame.select(columns).iter_rows()
    }


@functools.cache
def layer_times(model: str) -> dict[tuple[str, bool], tuple[Floats, Floats]]:
    """Tokens and ms of one layer, by machine type and whether they are prompts."""
    frame = pl.read_csv(HELIX / "helix_profiles.csv").filter(pl.col("model") == model)
    return {
        (str(machine), phase == "prompt"): (
            rows["batch_tokens"].to_numpy().astype(float),
            rows["layer_ms"].to_numpy(),
        )
        for (machine, phase), rows in frame.sort("batch_tokens").group_by("machine", "phase")
    }

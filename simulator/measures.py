"""What a run says of each workload and each node; definitions in docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.perf.grids import Floats
from planner.types import Slo
from simulator.run import Result, Status

QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class WorkloadMeasures:
    """One workload's requests that arrived inside the window, and how it was served.

    Rates are over the window's length; latencies over requests that ended inside or after it.
    """

    workload: str
    requests: int
    done: int
    lost: int  # no engine for its model
    too_long: int  # for any KV pool
    failed: int  # their engine died
    unfinished: int
    offered_rps: float
    attainment: float  # share of all requests that met both objectives
    ttft_attainment: float
    tpot_attainment: float
    goodput_rps: float
    goodput_tokens_per_s: float  # output tokens of requests that met both objectives
    output_tokens_per_s: float  # of all requests that ended
    ttft_ms: Mapping[str, float]  # 'p50', ...; empty where nothing ended
    tpot_ms: Mapping[str, float]
    queue_ms: Mapping[str, float]  # arrival to the first step
    preemptions: int


@dataclass(frozen=True, slots=True)
class LaneMeasures:
    """One tensor parallel group of a node."""

    engine: str
    stage: int
    node_class: str
    tensor_parallel_size: int
    utilization: float  # share of the run in which it computed
    peak_kv_share: float  # most blocks ever taken, of those it has


def measure(
    result: Result, slos: Mapping[str, Slo], window_s: tuple[float, float]
) -> list[WorkloadMeasures]:
    """Measures of every workload over the requests that arrive in [begin, end) of the window."""
    trace = result.trace
    begin, end = window_s
    inside = (trace.arrival_s >= begin) & (trace.arrival_s < end)
    return [
        _measure(result, name, slos[name], inside & (trace.workload == k), end - begin)
        for k, name in enumerate(trace.workloads)
    ]


def lane_measures(result: Result) -> list[LaneMeasures]:
    """Measures of every lane over the whole run."""
    lanes = [
        (engine.name, number, lane)
        for engine in result.engines
        for number, stage in enumerate(engine.stages)
        for lane in stage.lanes
    ]
    length_ms = max(result.end_s * 1e3, 1e-9)
    return [
        LaneMeasures(
            engine=name,
            stage=number,
            node_class=lane.kind.node.name,
            tensor_parallel_size=lane.kind.tensor_parallel_size,
            utilization=float(result.lane_busy_ms[k]) / length_ms,
            peak_kv_share=float(result.lane_peak_blocks[k]) / lane.kv_blocks,
        )
        for k, (name, number, lane) in enumerate(lanes)
    ]


def usd_per_million_tokens(cost_usd_per_hour: float, tokens_per_s: float) -> float:
    """Rent per million output tokens; infinite without tokens."""
    return cost_usd_per_hour / 3600.0 / tokens_per_s * 1e6 if tokens_per_s else float("inf")


def ttft_ms(result: Result) -> Floats:
    """Arrival to first token; only where there is one."""
    return result.first_ms - result.trace.arrival_s * 1e3


def tpot_ms(result: Result) -> Floats:
    """(last token - first token) / (output tokens - 1); 0 for a single token."""
    steps = np.maximum(result.trace.output_tokens - 1, 1)
    return (result.finish_ms - result.first_ms) / steps


def _measure(
    result: Result, name: str, slo: Slo, mine: NDArray[np.bool_], window_s: float
) -> WorkloadMeasures:
    trace = result.trace
    done = mine & (result.status == Status.DONE)
    ttft, tpot = ttft_ms(result), tpot_ms(result)
    quick, steady = done & (ttft <= slo.ttft_ms), done & (tpot <= slo.tpot_ms)
    good = quick & steady
    total = int(mine.sum())
    started = mine & (result.start_ms >= 0.0)

    def count(status: Status) -> int:
        return int((mine & (result.status == status)).sum())

    def share(which: NDArray[np.bool_]) -> float:
        return float(which.sum()) / total if total else 1.0

    return WorkloadMeasures(
        workload=name,
        requests=total,
        done=count(Status.DONE),
        lost=count(Status.LOST),
        too_long=count(Status.TOO_LONG),
        failed=count(Status.FAILED),
        unfinished=count(Status.UNFINISHED),
        offered_rps=total / window_s,
        attainment=share(good),
        ttft_attainment=share(quick),
        tpot_attainment=share(steady),
        goodput_rps=float(good.sum()) / window_s,
        goodput_tokens_per_s=float(trace.output_tokens[good].sum()) / window_s,
        output_tokens_per_s=float(trace.output_tokens[done].sum()) / window_s,
        ttft_ms=_quantiles(ttft[done]),
        tpot_ms=_quantiles(tpot[done & (trace.output_tokens > 1)]),
        queue_ms=_quantiles((result.start_ms - trace.arrival_s * 1e3)[started]),
        preemptions=int(result.preemptions[mine].sum()),
    )


def _quantiles(values: Floats, quantiles: Sequence[float] = QUANTILES) -> dict[str, float]:
    if not values.size:
        return {}
    found = np.quantile(values, quantiles)
    return {f"p{round(100 * q)}": float(x) for q, x in zip(quantiles, found, strict=True)}

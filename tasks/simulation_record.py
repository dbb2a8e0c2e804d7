"""A simulation in the catalog, as a page, and request by request."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from catalog import simulations
from catalog.store import Catalog
from planner.errors import InputError
from simulator.measures import tpot_ms, ttft_ms
from simulator.run import Status
from tasks.simulation_page import write_simulation_page

if TYPE_CHECKING:
    from tasks.simulation import Simulation


def record_simulation(catalog: Catalog, found: Simulation, events: Path | None = None) -> Path:
    """Append the figures and write the page, which is returned, and the event log if asked for.

    Raises InputError: the event log cannot be written; then nothing is.
    """
    if events is not None:
        write_events(found, events)
    now = datetime.now(UTC)
    report = catalog.home / "reports" / f"simulation-{found.id[:8]}.html"
    write_simulation_page(report, found, now)
    rows = [
        simulations.SimulationRow(
            simulation_id=found.id,
            scenario=found.scenario,
            decision_id=found.decision_id,
            trace=found.load.name,
            minutes=found.minutes,
            load=found.load.factor,
            seed=found.load.seed,
            workload=measured.workload,
            planned_rps=found.planned[measured.workload].served_rps,
            offered_rps=measured.offered_rps,
            requests=measured.requests,
            done=measured.done,
            lost=measured.lost,
            too_long=measured.too_long,
            failed=measured.failed,
            unfinished=measured.unfinished,
            attainment=measured.attainment,
            ttft_attainment=measured.ttft_attainment,
            tpot_attainment=measured.tpot_attainment,
            goodput_rps=measured.goodput_rps,
            goodput_tokens_per_s=measured.goodput_tokens_per_s,
            output_tokens_per_s=measured.output_tokens_per_s,
            ttft_p50_ms=measured.ttft_ms.get("p50"),
            ttft_p95_ms=measured.ttft_ms.get("p95"),
            tpot_p50_ms=measured.tpot_ms.get("p50"),
            tpot_p95_ms=measured.tpot_ms.get("p95"),
            queue_p95_ms=measured.queue_ms.get("p95"),
            preemptions=measured.preemptions,
            cost_usd_per_hour=found.cost_usd_per_hour,
            simulate_s=found.result.wall_s,
        )
        for measured in found.simulated
    ]
    with catalog.write() as connection:
        simulations.write_simulation(connection, rows, now)
    catalog.publish(force=True)
    return report


def write_events(found: Simulation, path: Path) -> None:
    """One row per request: when it came, started, had its first token, ended, and where.

    Seconds from the trace's beginning; null for what did not happen. Raises InputError.
    """
    result, trace = found.result, found.result.trace
    names = [engine.name for engine in result.engines]

    def seconds(values: str) -> pl.Expr:
        return pl.when(pl.col(values) >= 0).then(pl.col(values) / 1e3).alias(values[:-2] + "s")

    frame = pl.DataFrame(
        {
            "request": range(trace.requests),
            "workload": pl.Series([trace.workloads[k] for k in trace.workload], dtype=pl.String),
            "arrival_s": trace.arrival_s,
            "input_tokens": trace.input_tokens,
            "output_tokens": trace.output_tokens,
            "status": [Status(value).name.lower() for value in result.status],
            "start_ms": result.start_ms,
            "prompt_done_ms": result.handed_ms,
            "first_token_ms": result.first_ms,
            "finish_ms": result.finish_ms,
            "engine": [names[e] if e >= 0 else None for e in result.engine],
            "preemptions": result.preemptions,
            "ttft_ms": ttft_ms(result),
            "tpot_ms": tpot_ms(result),
        }
    )
    done, first = pl.col("status") == "done", pl.col("first_token_ms") >= 0
    frame = frame.select(
        "request", "workload", "arrival_s", "input_tokens", "output_tokens", "status",
        seconds("start_ms"), seconds("prompt_done_ms"), seconds("first_token_ms"),
        seconds("finish_ms"), "engine", "preemptions",
        ttft_ms=pl.when(first).then("ttft_ms"),
        tpot_ms=pl.when(done & (pl.col("output_tokens") > 1)).then("tpot_ms"),
    )  # fmt: skip
    try:
        frame.write_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(f"cannot write the event log {path}: {error}") from error

"""A week of `operate`, replayed fast: a round every ten minutes, with everything that can go wrong.

    python -m bench.soak --json

A scenario of one model on six spot and on-demand offers of two regions, a simulated fleet. Every
round the gateways' requests of ten minutes (a ServeGen stream, Poisson by minute) come as a Parquet
file into the inbox, prices and stock (synthetic, fitted to real traces) as a file of offers that
`refresh` reads, and the round plans and applies as the deployment does. Faults: launches that find
no capacity, nodes that are taken, offers that cannot be read for hours, files in the inbox that are
none, another program that keeps the database open, rounds killed (SIGKILL) in their midst, and the
clock set back. All the while another process opens the snapshot and asks.

`failed` counts rounds that ended with an error; one that is no named error of Coral's is
`unexplained`. A round that failed or was killed is followed by the next at its time, as scheduled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import numpy as np
import polars as pl

from bench.demand import shipped_histories
from catalog.seed import seed_folder
from catalog.store import Catalog
from executor.home import HomeFiles
from planner.errors import CoralError
from planner.leases import LeaseState
from planner.scenario import ScenarioSpec
from simulator.market import MarketFit, SyntheticMarket
from tasks.allocation import allocation_input, read_library
from tasks.inputs import load_inputs
from tasks.library import build_phase, share_templates
from tasks.market.refresh import refresh
from tasks.operating import lease_store, operate_once
from tasks.round_ends import close, look
from tasks.scenario_file import read_scenario
from tasks.solving import Solvers

BEGAN = datetime(2026, 3, 2, tzinfo=UTC)
STEP = timedelta(minutes=10)
STREAM, MODEL = "servegen-m-large", "Qwen/Qwen3-14B"
MEAN_RPS = 20.0
KILLS, LOCKS, GARBAGE, SET_BACK = 0.01, 0.01, 0.02, 0.003  # of the rounds
UNREADABLE = ((30.0, 33.0), (100.0, 101.0))  # hours in which the offers cannot be read
SHELL = (
    "import duckdb, sys, time; kept = duckdb.connect(sys.argv[1]); print(1, flush=True); "
    "time.sleep(600)"
)
PATIENCE_S = 2.0  # with a locked database; commands wait longer


@dataclass
class Found:
    """What a week came to."""

    runs: int = 0
    killed: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # by the error's name
    unexplained: list[str] = field(default_factory=list)
    refresh_failures: int = 0
    broken_files: int = 0
    launched: int = 0
    not_launched: int = 0
    shortfalls: int = 0
    round_ms: list[float] = field(default_factory=list)
    db_mib: list[float] = field(default_factory=list)  # by day


def main() -> None:
    """Parse, replay, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        result = soak(Path(folder), options.days, options.seed)
    print(json.dumps(result, indent=None if options.json else 2))


def soak(folder: Path, days: float, seed: int) -> dict[str, Any]:
    """A replay in a folder."""
    catalog, offers = Catalog(folder, PATIENCE_S), folder / "offers.csv"
    spec = scenario(offers)
    market = prepare(catalog, spec, days, seed)
    found, rng = Found(), np.random.default_rng(seed)
    rates = rates_rps(days)
    with reading(catalog) as reads:
        for number in range(int(days * 24 * 60 / 10)):
            hours = number / 6.0
            now = BEGAN + STEP * number
            if rng.random() < SET_BACK:
                now -= timedelta(minutes=25)
            write_requests(catalog, number, rates, rng)
            write_offers(offers, market, hours)
            if rng.random() < GARBAGE:
                (HomeFiles(catalog.home).inbox / f"{number}-torn.parquet").write_bytes(b"PAR1 torn")
            one_run(catalog, spec, now, found, rng)
            if number % 144 == 143 or number == int(days * 144) - 1:
                found.db_mib.append(catalog.database.stat().st_size / 2**20)
                print(f"day {hours / 24:.1f}: {found.runs} rounds, {dict(found.errors)}",
                      file=sys.stderr)  # fmt: skip
    return summary(catalog, found, reads, days)


def scenario(offers: Path) -> ScenarioSpec:
    """Tiny in two regions, on spot and on demand, with the requests that gateways saw."""
    values = read_scenario("tiny").model_dump(exclude_unset=True, mode="json")
    values |= {
        "name": "soak",
        "domains": ["aws:us-east-1", "aws:us-west-2"],
        "markets": ["spot", "on_demand"],
        "stock": {"level": "limited", "factor": 1.0},
        "market": {"sources": [str(offers)], "stale_after_minutes": {str(offers): 60.0}},
        "fleet": {"failure_rate": 0.05, "preemptions_per_hour": 0.02, "max_usd_per_hour": 60.0},
        "allocation": {"deadline_s": 2.0},
    }
    values["workloads"][0]["demand"] = {"observed": {"at_first_rps": MEAN_RPS}}
    return ScenarioSpec.model_validate(values)


def prepare(catalog: Catalog, spec: ScenarioSpec, days: float, seed: int) -> SyntheticMarket:
    """The library, and the market that moves."""
    shipped = spec.model_copy(update={"market": read_scenario("tiny").market})
    inputs = load_inputs(catalog, shipped, BEGAN)
    with Solvers(workers=0) as solvers:
        for phase in inputs.phases:
            build_phase(catalog, phase, solvers)
    share_templates(catalog, inputs.phases)
    catalog.publish(force=True)
    HomeFiles(catalog.home).inbox.mkdir()
    data = allocation_input(inputs, read_library(catalog, inputs))
    fit = MarketFit.of((seed_folder() / "market_fit.json").read_text(encoding="utf-8"))
    return SyntheticMarket.draw(fit, data.offers, 24.0 * days + 1.0, seed)


def one_run(
    catalog: Catalog, spec: ScenarioSpec, now: datetime, found: Found, rng: np.random.Generator
) -> None:
    """A refresh and a round as scheduled, perhaps killed, perhaps with the database held."""
    found.runs += 1
    try:
        refresh(catalog, spec.market, now)
    except CoralError:
        found.refresh_failures += 1
    if rng.random() < KILLS:
        found.killed += kill_one(catalog, spec, now, float(rng.uniform(0.0, 2.0)))
        return
    held = held_open(catalog) if rng.random() < LOCKS else contextlib.nullcontext()
    began = time.perf_counter()
    try:
        with held:
            one_round(catalog, spec, now, found)
    except CoralError as error:
        found.errors[type(error).__name__] += 1
    except Exception as error:
        found.errors[type(error).__name__] += 1
        found.unexplained.append(f"{now:%d %H:%M} {type(error).__name__}: {error}"[:300])
    found.round_ms.append(1e3 * (time.perf_counter() - began))


def one_round(
    catalog: Catalog, spec: ScenarioSpec, now: datetime, found: Found, begun: Any = None
) -> None:
    """What the flow `operate` does, at a time of the replay, but for what it tells Prefect."""
    if begun is not None:
        begun.set()
    seen = look(catalog, spec, now)
    found.broken_files += len(seen.demand.broken)
    result = operate_once(catalog, spec, seen.inputs, now)
    found.launched += result.applied.launched
    found.not_launched += result.applied.failed
    if result.decision is not None and result.decision.coral.served_share < 1.0 - 1e-6:
        found.shortfalls += 1
    close(catalog)


def kill_one(catalog: Catalog, spec: ScenarioSpec, now: datetime, after_s: float) -> bool:
    """The same in a process of its own, killed so long after it began; whether it still ran."""
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(target=one_round, args=(catalog, spec, now, Found(), begun))
    process.start()
    begun.wait(60.0)
    process.join(after_s)
    runs = process.is_alive()
    if runs and process.pid is not None:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return runs


@contextlib.contextmanager
def held_open(catalog: Catalog) -> Iterator[None]:
    """Somebody's DuckDB shell has the database open for writing."""
    with subprocess.Popen(
        [sys.executable, "-c", SHELL, str(catalog.database)], stdout=subprocess.PIPE
    ) as shell:
        try:
            if shell.stdout is not None:
                shell.stdout.readline()
            yield
        finally:
            shell.kill()


@contextlib.contextmanager
def reading(catalog: Catalog) -> Iterator[Any]:
    """An analyst that opens the snapshot again and again: [reads, errors]."""
    context = multiprocessing.get_context("spawn")
    counts, stop = context.Array("q", [0, 0]), context.Event()
    process = context.Process(target=_read, args=(catalog.snapshot, counts, stop))
    process.start()
    try:
        yield counts
    finally:
        stop.set()
        process.join()
        if process.exitcode:
            counts[1] += 1


def _read(snapshot: Path, counts: Any, stop: Any) -> None:
    while not stop.wait(0.2):
        try:
            with duckdb.connect(str(snapshot), read_only=True) as connection:
                connection.execute("SELECT count(*) FROM allocation").fetchall()
                connection.execute("FROM fleet_now").fetchall()
            counts[0] += 1
        except duckdb.Error as error:
            counts[1] += 1
            print(f"reader: {error}", file=sys.stderr)


def rates_rps(days: float) -> Any:
    """Requests/s of every minute."""
    (history,) = [one for one in shipped_histories() if one.name == STREAM]
    rates = np.repeat(history.rates_rps, round(history.window_minutes))
    rates = np.tile(rates, 1 + int(days * 1440 / rates.size))[: int(days * 1440) + 10]
    return rates * MEAN_RPS / rates.mean()


def write_requests(catalog: Catalog, number: int, rates: Any, rng: np.random.Generator) -> None:
    """Ten minutes of one gateway, those before the round."""
    first = max(0, 10 * (number - 1))
    counts = rng.poisson(60.0 * rates[first : first + 10])
    minutes = [BEGAN + timedelta(minutes=first + k) for k in range(counts.size)]
    rows = pl.DataFrame(
        {
            "minute": minutes, "model": MODEL, "gateway": "g1", "requests": counts,
            "turned_away": 0, "measured": counts, "prompt_tokens": counts * 1200,
            "output_tokens": counts * 210, "prompt_tokens_p95": 4000.0,
            "output_tokens_p95": 450.0,
        },
        schema_overrides={"minute": pl.Datetime("us", "UTC"), "turned_away": pl.Int64},
    )  # fmt: skip
    if number:
        rows.write_parquet(HomeFiles(catalog.home).inbox / f"g1-{number:05d}.parquet")


def write_offers(path: Path, market: SyntheticMarket, hours: float) -> None:
    """Prices and stock as a file; for some hours one that is torn."""
    if any(first <= hours < last for first, last in UNREADABLE):
        path.write_text('domain,instance_type\n"')
        return
    rows = [
        (o.domain, o.instance_type, o.market.value, round(o.price_usd_per_hour, 5), o.stock)
        for o in market.at(hours)
    ]
    names = ["domain", "instance_type", "market", "price_usd_per_hour", "nodes"]
    draft = path.with_suffix(".draft")
    pl.DataFrame(rows, names, orient="row").write_csv(draft)
    draft.replace(path)


def summary(catalog: Catalog, found: Found, reads: Any, days: float) -> dict[str, Any]:
    """One object."""
    leases = lease_store(catalog).all()
    states = Counter(lease.state for lease in leases)
    times = np.array(found.round_ms)
    day = min(144, times.size)
    growth = (found.db_mib[-1] - found.db_mib[0]) / max(1, len(found.db_mib) - 1)
    return {
        "days": days,
        "runs": found.runs,
        "failed": sum(found.errors.values()),
        "errors": dict(found.errors),
        "unexplained": len(found.unexplained),
        "examples": found.unexplained[:3],
        "killed": found.killed,
        "refresh_failures": found.refresh_failures,
        "broken_files": found.broken_files,
        "reads": reads[0],
        "reader_errors": reads[1],
        "launched": found.launched,
        "not_launched": found.not_launched,
        "shortfalls": found.shortfalls,
        "leases": len(leases),
        "running": sum(
            n for state, n in states.items() if state in {LeaseState.RUNNING, LeaseState.READY}
        ),
        "db_mib": round(found.db_mib[-1], 2),
        "db_mib_per_day": round(growth, 3),
        "snapshot_mib": round(catalog.snapshot.stat().st_size / 2**20, 2),
        "leases_mib": round(HomeFiles(catalog.home).leases.stat().st_size / 2**20, 2),
        "reports_mib": round(
            sum(f.stat().st_size for f in (catalog.home / "reports").iterdir()) / 2**20, 2
        ),
        "round_ms_p50_first_day": round(float(np.median(times[:day])), 1),
        "round_ms_p50_last_day": round(float(np.median(times[-day:])), 1),
        "round_ms_p95": round(float(np.percentile(times, 95)), 1),
    }


if __name__ == "__main__":
    main()

"""The market at size: a refresh over many regions, and a million rows of price history.

    python -m bench.market --regions 20 --rows 1000000 --json

The refresh talks HTTP to the tests' local AWS server in a process of its own (needs the `dev`
extra). The history is every AWS spot price of the shipped snapshot moved by the real price ratios
of `bench/data/market`, taken in by the same code as a refresh, beside the same prices kept at every
pull instead of at every change. `share` is that of what the plain way would keep.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import polars as pl

from bench.moving_market import PRICES_FROM, price_ratios
from catalog.market.pull import PRICED, PRICES, Limits, Part, Pull
from catalog.market.writes import append_pull
from catalog.seed import import_seed
from catalog.store import Catalog
from planner.market import AWS, MarketSpec
from tasks.market.refresh import refresh
from tasks.market.state import read_state
from tests.support.aws_data import shipped_snapshot

MOVES_HOURS = 6.0  # between two prices of one offer
PULL_MINUTES = 10.0
RUNS = 5


def refresh_seconds(regions: int) -> dict[str, float]:
    """First and second refresh over so many regions, from an empty home."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(theirs,), daemon=True
    )
    process.start()
    os.environ.update(ours.recv())
    names = shipped_snapshot().regions[:regions]
    market = MarketSpec(sources=(AWS,), aws_regions=tuple(names))
    with tempfile.TemporaryDirectory() as home:
        catalog = Catalog(Path(home))
        first = refresh(catalog, market, datetime.now(UTC))
        second = refresh(catalog, market, datetime.now(UTC))
    ours.send("end")
    process.join(timeout=10)
    failed = len(first.partly) + len(first.failed)
    return {
        "regions": len(names),
        "prices": sum(one.prices for one in first.landed),
        "not_answered": failed,
        "refresh_s": round(first.seconds, 2),
        "second_refresh_s": round(second.seconds, 2),
        "second_changed": sum(one.changed for one in second.landed),
    }


def history(rows: int, home: Path) -> dict[str, float]:
    """Fill a home with so many price changes, then time what reads it."""
    catalog = Catalog(home)
    with catalog.write() as connection:
        import_seed(connection)
    moved = _moved(rows)
    parts = [Part(str(domain), of) for domain in moved["domain"].unique() for of in PRICED]
    now = datetime.now(UTC)
    started = time.perf_counter()
    with catalog.write() as connection:
        landed = append_pull(connection, Pull(AWS, now, moved, parts), Limits())
    append_s = time.perf_counter() - started
    started = time.perf_counter()
    catalog.publish(force=True)
    publish_s = time.perf_counter() - started
    with catalog.read() as connection:
        reads = [_read_once(connection) for _ in range(RUNS)]
        kept = connection.execute("SELECT count(*) FROM offer").fetchall()[0][0]
    coral = str(Path(sys.executable).parent / "coral")
    command = [coral, "market", "show", "--gpu", "L4", "--json", "--home", str(home)]
    cpu_s = _children_s()
    shows = [_timed(command) for _ in range(RUNS)]
    cpu_s = (_children_s() - cpu_s) / RUNS
    span = timedelta(hours=MOVES_HOURS) * (rows / _keys().height)
    pulls = span / timedelta(minutes=PULL_MINUTES)
    return {
        "rows": kept,
        "changed": landed.changed,
        "append_s": round(append_s, 2),
        "publish_s": round(publish_s, 2),
        "market_show_s": round(float(np.median(shows)), 3),
        "market_show_cpu_s": round(cpu_s, 3),
        "allocation_read_s": round(float(np.median(reads)), 3),
        "database_mib": round(catalog.database.stat().st_size / 2**20, 1),
        "days": round(span / timedelta(days=1), 1),
        "rows_if_every_pull_were_kept": round(pulls * _keys().height),
        "share": round(kept / (pulls * _keys().height), 4),
    }


def _read_once(connection: object) -> float:
    started = time.perf_counter()
    market = MarketSpec(sources=(AWS, "snapshot"))
    read_state(connection, market, datetime.now(UTC))  # type: ignore[arg-type]
    return time.perf_counter() - started


def _timed(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def _children_s() -> float:
    """CPU time of the processes that were started and have ended, on all cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _keys() -> pl.DataFrame:
    """Every spot offer of the snapshot's AWS rows that is below on-demand."""
    data = shipped_snapshot()
    return pl.DataFrame(
        [
            {"domain": f"aws:{p.region}", "zone": p.zone_id, "instance_type": p.instance_type,
             "base": p.price}
            for p in data.spot
            if p.price > 0
            and p.price < data.on_demand.get((p.region, p.instance_type), float("inf"))
        ]
    ).unique(["domain", "zone", "instance_type"], maintain_order=True)  # fmt: skip


def _moved(rows: int) -> pl.DataFrame:
    """So many changes over all offers, `MOVES_HOURS` apart, back from now."""
    keys, ratios = _keys(), price_ratios(PRICES_FROM)
    each = int(1.25 * rows / keys.height)  # a fifth says nothing new and is not kept
    end = datetime.now(UTC) - timedelta(minutes=1)
    frames = []
    for number, key in enumerate(keys.iter_rows(named=True)):
        _, ratio = ratios[number % len(ratios)]
        steps = np.arange(each)
        # A tenth of a per mille per step: real movements repeat, and no two rows may be equal.
        price = key["base"] * ratio[steps % len(ratio)] * (1.0 + 1e-4 * (steps % 97))
        times = [end - timedelta(hours=MOVES_HOURS * float(each - step)) for step in steps]
        frames.append(
            pl.DataFrame({"observed_at": times, "price_usd_per_hour": np.round(price, 4)}).select(
                "observed_at",
                cloud=pl.lit(AWS),
                domain=pl.lit(key["domain"]),
                zone=pl.lit(key["zone"]),
                instance_type=pl.lit(key["instance_type"]),
                market=pl.lit("spot"),
                price_usd_per_hour="price_usd_per_hour",
                nodes=pl.lit(None, pl.Int32),
                source=pl.lit("ec2 DescribeSpotPriceHistory"),
            )
        )
    return pl.concat(frames).cast(PRICES)  # type: ignore[arg-type]


def _serve(pipe: Connection) -> None:
    from tests.support.aws_server import AwsServer

    with AwsServer(page_size=1000) as server:
        pipe.send(server.variables())
        pipe.recv()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--regions", type=int, default=20)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["PREFECT_LOGGING_ROOT_LEVEL"] = "CRITICAL"
    result = {"refresh": refresh_seconds(options.regions)}
    with tempfile.TemporaryDirectory() as home:
        result["history"] = history(options.rows, Path(home))
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""Fit the synthetic market's numbers to the shipped real traces.

    python -m bench.market_fit --write

Prices: of every series the logarithms over its mean, from one change to the next. Stock: counts of
steps between levels of available nodes, all zones together. `--write` replaces
`catalog/seed/market_fit.json`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import polars as pl

from bench.moving_market import DATA
from catalog.seed import seed_folder

ERROR_QUANTILES = 21
STEP_MINUTES = 5.0
SOURCE = (
    "fitted by bench/market_fit.py to spot prices of Azure, 2026-04-02 to 2026-05-08 "
    "(anycloud-sh/catalog@62ff0a98), and to spot nodes of AWS p3.2xlarge, 2023-08-27 to 2023-09-12 "
    "(skypilot-org/spot-traces@221da1ab); neither is of the GPUs that it is applied to"
)


def fit_prices(table: pl.DataFrame) -> tuple[float, float, list[float]]:
    """Changes per day, memory, quantiles of the errors."""
    before, after, days = [], [], 0.0
    for _, frame in sorted(table.group_by("location", "instance_type"), key=lambda x: str(x[0])):
        frame = frame.sort("observed_at")
        logs = np.log(frame["spot_usd_h"].to_numpy())
        logs = logs - logs.mean()
        before.append(logs[:-1])
        after.append(logs[1:])
        times = frame["observed_at"]
        days += (times[-1] - times[0]).total_seconds() / 86_400.0
    x, y = np.concatenate(before), np.concatenate(after)
    memory = float(x @ y / (x @ x))
    errors = np.quantile(y - memory * x, np.linspace(0.0, 1.0, ERROR_QUANTILES))
    return x.size / days, memory, [round(float(e), 5) for e in errors]


def fit_stock(table: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Probabilities of steps between levels; steps over gaps in the trace are left out."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for _, frame in table.group_by("zone"):
        frame = frame.sort("ts")
        gap = frame["ts"].diff().dt.total_seconds().to_numpy()[1:]
        levels = frame["available_nodes"].to_list()
        for k, seconds in enumerate(gap):
            if abs(seconds - 60.0 * STEP_MINUTES) < 1.0:
                counts[levels[k]][levels[k + 1]] += 1
    return {
        str(level): {
            str(to): round(count / sum(found.values()), 6) for to, count in sorted(found.items())
        }
        for level, found in sorted(counts.items())
    }


def main() -> None:
    """Fit, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    changes, memory, errors = fit_prices(pl.read_parquet(DATA / "spot_prices_azure_2026.parquet"))
    fit = {
        "price_changes_per_day": round(changes, 4),
        "price_memory": round(memory, 4),
        "price_errors": errors,
        "stock_minutes": STEP_MINUTES,
        "stock_steps": fit_stock(pl.read_parquet(DATA / "availability_16_nodes.parquet")),
        "source": SOURCE,
    }
    text = json.dumps(fit)
    if options.write:
        path: Path = seed_folder() / "market_fit.json"
        path.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

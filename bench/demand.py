"""Forecasts against what came, and against simple rules, on the shipped histories.

    python -m bench.demand --json

Every history is walked through from its fourth day on (or its second quarter, if it has only one
day); a forecast sees nothing but the windows before it. `fixed` is the last rate times the same
margin that the forecast came to on average: equal requests planned.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from catalog import reads
from catalog.seed import import_seed
from catalog.store import Catalog
from planner.demand import Coverage, DemandHistory, coverage, coverage_of

DAYS_BEFORE = 3


def shipped_histories() -> list[DemandHistory]:
    """All of the seed data."""
    with tempfile.TemporaryDirectory() as home:
        catalog = Catalog(Path(home))
        with catalog.write() as connection:
            import_seed(connection)
        with catalog.read() as connection:
            return [DemandHistory.of(*row) for row in reads.read_demand_histories(connection)]


def fixed_margin(
    history: DemandHistory, horizon_minutes: float, margin: float, first: int
) -> Coverage:
    """The last rate times a margin."""

    def planned(known: int) -> float:
        return margin * float(history.rates_rps[known - 1])

    return coverage_of(planned, history, horizon_minutes, first_window=first)


def main() -> None:
    """Parse, walk, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--horizon", type=float, default=20.0, help="minutes")
    parser.add_argument("--quantile", type=float, default=0.95)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    table = Table("history", "rule", "windows", "covered", "planned / came", "unserved")
    rows = []
    for history in shipped_histories():
        day = round(24 * 60 / history.window_minutes)
        first = DAYS_BEFORE * day if history.rates_rps.size > 2 * DAYS_BEFORE * day else day // 4
        found = coverage(history, options.horizon, options.quantile, first_window=first)
        fixed = fixed_margin(history, options.horizon, found.planned_over_served, first)
        rows.append({"history": history.name, **asdict(found), "fixed": asdict(fixed)})
        for rule, line in (("forecast", found), ("fixed", fixed)):
            table.add_row(
                history.name, rule, str(line.windows), f"{line.covered:.1%}",
                f"{line.planned_over_served:.2f}", f"{line.unserved_share:.2%}",
            )  # fmt: skip
    Console(stderr=options.json).print(table)
    if options.json:
        print(json.dumps({"quantile": options.quantile, "histories": rows}))


if __name__ == "__main__":
    main()

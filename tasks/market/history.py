"""How prices moved: changes as rows, and lines over time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.dates as mdates
import polars as pl
from matplotlib.figure import Figure

from catalog.market.views import Filter, read_changes, read_gaps, read_lines
from catalog.store import Catalog
from planner.errors import InputError

STYLE: dict[Any, Any] = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
COLUMNS = ["at (UTC)", "domain", "zone", "instance type", "market", "before $/h", "$/h", "change",
           "source"]  # fmt: skip
MOST_LINES = 10
KEY = ["feed", "domain", "zone", "instance_type", "market"]


@dataclass(frozen=True)
class History:
    """Price changes of some hours, and the times in which nothing was seen."""

    columns: list[str]
    rows: list[tuple[object, ...]]
    found: int
    gaps: list[tuple[object, ...]]  # source, domain, part, from, to, minutes, why
    plot: Path | None


def price_history(
    catalog: Catalog, wanted: Filter, hours: float, limit: int, plot: Path | None = None
) -> History:
    """The newest changes from the snapshot, and a plot where one is asked for.

    Raises InputError: nothing to draw, or a file that cannot be written.
    """
    with catalog.read_snapshot() as connection:
        changes = read_changes(connection, wanted, hours)
        gaps = read_gaps(connection, hours)
        lines = read_lines(connection, wanted, hours) if plot is not None else None
    if plot is not None and lines is not None:
        draw_lines(lines, hours, plot, datetime.now(UTC))
    return History(
        columns=COLUMNS,
        rows=[
            (
                f"{one['observed_at'].astimezone(UTC):%Y-%m-%d %H:%M}",
                one["domain"],
                one["zone"],
                one["instance_type"],
                one["market"],
                one["before_usd_per_hour"],
                one["price_usd_per_hour"],
                f"{one['change']:+.1%}",
                one["feed"],
            )
            for one in changes.head(limit).iter_rows(named=True)
        ],
        found=changes.height,
        gaps=gaps.rows(),
        plot=plot,
    )


def draw_lines(lines: pl.DataFrame, hours: float, path: Path, now: datetime) -> None:
    """Prices as steps over the time, those that moved most; a line ends where an offer does.

    Raises InputError: no price to draw, or the file cannot be written.
    """
    if lines.drop_nulls("price").is_empty():
        raise InputError("no price of such offers in that time; see `coral market show`")
    start = now - timedelta(hours=hours)
    moved = (
        lines.group_by(KEY)
        .agg(rows=pl.len(), spread=pl.col("price").max() / pl.col("price").min())
        .sort("spread", "rows", *KEY, descending=[True, True, *[False] * len(KEY)], nulls_last=True)
    )
    movers = moved.filter(pl.col("spread") > 1.0)
    shown = (movers if movers.height else moved).head(MOST_LINES)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        axes = figure.subplots()
        for key in shown.select(KEY).iter_rows():
            mine = lines.filter(
                pl.all_horizontal(
                    pl.col(name).eq_missing(pl.lit(value))
                    for name, value in zip(KEY, key, strict=True)
                )
            )
            at, price = _steps(mine, start, now)
            _, domain, zone, kind, market = key
            name = f"{kind} {market.replace('_', '-')} {zone or domain}"
            axes.step(at, price, where="post", lw=1.2, label=name)  # type: ignore[arg-type]
        axes.set_xlim(start, now)  # type: ignore[arg-type]
        axes.xaxis.set_major_formatter(
            mdates.ConciseDateFormatter(axes.xaxis.get_major_locator())  # type: ignore[no-untyped-call]
        )
        axes.set_ylim(bottom=0.0)
        axes.set_ylabel("USD per GPU and hour")
        left = moved.height - shown.height
        more = f" ({left} more offers moved less or not at all)" if left > 0 else ""
        axes.set_title(f"Prices of the last {hours:g} h, UTC{more}", loc="left", fontsize=9)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
        try:
            figure.savefig(path, dpi=130)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot draw into {path}: {error}") from error


def _steps(
    mine: pl.DataFrame, start: datetime, now: datetime
) -> tuple[list[datetime], list[float]]:
    """Times and prices, from the start on and up to now."""
    at = [max(time.astimezone(UTC), start) for time in mine["observed_at"].to_list()]
    price = [float("nan") if value is None else value for value in mine["price"].to_list()]
    return [*at, now], [*price, price[-1]]

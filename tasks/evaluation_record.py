"""An evaluation in the catalog, as a table, as a plot, and the synthetic market that it had."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import polars as pl
from matplotlib.figure import Figure

from catalog import simulations
from catalog.store import Catalog
from planner.types import Market
from simulator.market import SyntheticMarket

if TYPE_CHECKING:
    from tasks.evaluation import Evaluation

STYLE: dict[Any, Any] = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
COLOURS = {"coral": "#D55E00", "homo": "#0072B2", "cauchy": "#7f7f7f"}


def record_evaluation(catalog: Catalog, found: Evaluation, market: SyntheticMarket) -> Evaluation:
    """Append the intervals, write table, plot and market, and say where they are."""
    folder = catalog.home / "reports"
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"evaluation-{found.scenario}-{found.id[:8]}"
    table, plot = stem.with_suffix(".csv"), stem.with_suffix(".png")
    drawn = stem.with_name(f"{stem.name}-market.parquet")
    pl.DataFrame([asdict(each) for each in found.intervals]).write_csv(table)
    market_frame(found, market).write_parquet(drawn)
    draw_evaluation(found, plot)
    rows = [
        simulations.EvaluationRow(
            evaluation_id=found.id, scenario=found.scenario, seed=found.replay.seed,
            every_minutes=found.replay.every_minutes, market_source=found.market_source,
            **asdict(each),
        )
        for each in found.intervals
    ]  # fmt: skip
    with catalog.write() as connection:
        simulations.write_evaluation(connection, rows, datetime.now(UTC))
    catalog.publish(force=True)
    return replace(found, table=table, plot=plot, market=drawn)


def market_frame(found: Evaluation, market: SyntheticMarket) -> pl.DataFrame:
    """Spot prices and nodes at every step, labelled synthetic."""
    rows = []
    for at in [0.0, *market.steps(0.0, market.hours)]:
        for offer in market.at(at):
            if offer.market is Market.SPOT:
                rows.append(
                    (at, offer.domain, offer.instance_type, offer.price_usd_per_hour, offer.stock)
                )
    frame = pl.DataFrame(
        rows,
        schema=["hours", "domain", "instance_type", "spot_usd_per_hour", "spot_nodes"],
        orient="row",
    )
    return frame.with_columns(
        source=pl.lit(f"synthetic, seed {found.replay.seed}: {found.market_source}")
    )


def draw_evaluation(found: Evaluation, path: Path) -> None:
    """Cost, goodput and attainment over time, a line per planner."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.5, 7.0), layout="constrained")
        cost, goodput, met = figure.subplots(3, 1, sharex=True)
        names = list(dict.fromkeys(each.planner for each in found.intervals))
        for place, planner in enumerate(names):  # thinner ones over thicker ones: all are seen
            mine = found.of(planner)
            hours = [each.hours for each in mine]
            colour = COLOURS.get(planner, "#000000")
            for axes, values in (
                (cost, [each.usd_per_hour for each in mine]),
                (goodput, [each.goodput_tokens_per_s for each in mine]),
                (met, [100.0 * each.attainment for each in mine]),
            ):
                axes.step(hours, values, where="post", color=colour, lw=3.0 - place, label=planner)
        cost.set_ylabel("USD/hour")
        goodput.set_ylabel("output tokens/s\nwithin both SLOs")
        met.set_ylabel("requests within\nboth SLOs, %")
        for axes in (cost, goodput, met):
            axes.set_ylim(bottom=0.0)
        met.set_ylim(top=102.0)
        met.set_xlabel("hours")
        handles, labels = cost.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(
            f"{found.scenario}: plans every {found.replay.every_minutes:g} minutes on a synthetic "
            f"spot market, seed {found.replay.seed}", fontsize=9,
        )  # fmt: skip
        figure.savefig(path, dpi=130)

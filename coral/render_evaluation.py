"""What `coral evaluate` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from coral.console import make_console

if TYPE_CHECKING:
    from tasks.evaluation import Evaluation, Interval


def evaluation_summary(found: Evaluation) -> dict[str, Any]:
    """The JSON object of an evaluation."""
    return {
        "scenario": found.scenario,
        "evaluation_id": found.id,
        **asdict(found.replay),
        "market": found.market_source,
        "planners": {planner: _sums(found.of(planner)) for planner in _planners(found)},
        "table": str(found.table),
        "plot": str(found.plot),
        "market_trace": str(found.market),
    }


def print_evaluation(found: Evaluation) -> None:
    """A line per planner over the whole time."""
    console = make_console()
    table = Table(
        title=f"{found.replay.hours:g} hours of scenario {found.scenario}, plans every "
        f"{found.replay.every_minutes:g} minutes and after losses",
        title_justify="left",
    )
    table.add_column("planner")
    for name in (
        "USD/hour", "within both SLOs", "goodput tok/s", "USD per M good tokens", "nodes lost",
        "plans", "replicas started", "median solve s",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for planner in _planners(found):
        sums = _sums(found.of(planner))
        per_million = sums["usd_per_million_good_tokens"]
        table.add_row(
            planner,
            f"{sums['usd_per_hour']:.2f}",
            f"{sums['attainment']:.1%}",
            f"{sums['goodput_tokens_per_s']:.0f}",
            "-" if per_million is None else f"{per_million:.3f}",
            str(sums["lost_nodes"]),
            str(sums["plans"]),
            str(sums["replicas_started"]),
            f"{sums['median_solve_s']:.1f}",
        )
    console.print(table)
    console.print(
        "The spot market is synthetic, fitted to real traces of other GPUs; demand is ServeGen's, "
        "scaled. Homo and Cauchy: their best order of the workloads."
    )
    for path in (found.table, found.plot, found.market):
        console.print(str(path), soft_wrap=True)


def _planners(found: Evaluation) -> list[str]:
    return list(dict.fromkeys(each.planner for each in found.intervals))


def _sums(mine: Sequence[Interval]) -> dict[str, Any]:
    requests = sum(each.requests for each in mine)
    goodput = sum(each.goodput_tokens_per_s for each in mine) / len(mine)
    usd = sum(each.usd_per_hour for each in mine) / len(mine)
    solves = sorted(each.solve_s for each in mine)
    good = sum(each.attainment * each.requests for each in mine)
    return {
        "usd_per_hour": usd,
        "attainment": good / requests if requests else 1.0,
        "goodput_tokens_per_s": goodput,
        "usd_per_million_good_tokens": usd / 3600.0 / goodput * 1e6 if goodput else None,
        "requests": requests,
        "lost_nodes": sum(each.lost_nodes for each in mine),
        "plans": sum(each.plans for each in mine),
        "replicas_started": sum(each.replicas_started for each in mine),
        "median_solve_s": solves[len(solves) // 2],
    }

"""What `coral compare` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from coral.console import make_console
from planner.engine import Engine

if TYPE_CHECKING:
    from tasks.comparison import Comparison
    from tasks.comparison_view import Line

PAPER = """\
The paper (arXiv 2605.04357) reports, at most, 2.79x the cost with Homo, 2.66x with Cauchy and 2.39x
the goodput in its extended setup; 1.62x and 1.60x in its core setup. Baselines may do more here:
replicas of several nodes, any domain, the same caps, optimal plans of each workload and (but for
cauchy) aggregated serving. Homo-joint also plans all workloads together, so that mixed replicas are
all that Coral has over it; homo and cauchy are nearest to the paper's. Prices, stock, demand and
step times differ too."""
NOT_ABLATED = (
    "The initialisation penalty acts from round to round on a market that moves, not on one plan: "
    "`python -m bench.stability` measures it."
)


def comparison_summary(result: Comparison) -> dict[str, Any]:
    """The JSON object of a comparison."""
    from tasks.comparison_view import ratios

    return {
        "title": result.title,
        "lines": [asdict(line) for line in result.lines],
        "ratios": [asdict(ratio) for ratio in ratios(result.lines)],
        "table": str(result.table),
        "plot": str(result.plot),
    }


def print_comparison(result: Comparison) -> None:
    """A line per case and planner, then every planner against Coral, for each engine."""
    from tasks.comparison_view import TITLES

    console = make_console()
    for engine in dict.fromkeys(line.engine for line in result.lines):
        console.print(f"With {TITLES[engine]}:")
        _print_lines(console, result, engine)
        _print_ratios(console, result, engine)
    console.print(
        "Cost: the planner's over Coral's where both serve everything. Goodput: Coral's served "
        "tokens over the planner's elsewhere. Planners that go one workload after another are "
        "means over orders. Coral and looser planners may keep the plans of stricter ones. "
        "Differences below the gaps mean nothing: a longer --deadline closes those. In SLO: of the "
        "requests that a plan serves, in simulation, both objectives met; goodput: output tokens "
        "of those."
    )
    console.print(NOT_ABLATED if result.ablated else PAPER)
    console.print(f"Table: {result.table}\nPlot: {result.plot}", soft_wrap=True)


def _print_lines(console: Console, result: Comparison, engine: Engine) -> None:
    simulated = any(line.goodput_tokens_per_s is not None for line in result.lines)
    table = Table("case", "planner", "USD/hour", "served", "nodes", "gap", "seconds")
    for name in ("in SLO", "goodput tok/s") if simulated else ():
        table.add_column(name, justify="right")
    case = None
    for line in result.lines:
        if line.engine is not engine:
            continue
        table.add_row(
            line.case if line.case != case else "",
            line.planner,
            f"{line.usd_per_hour:.2f}",
            f"{line.served_share:.2%}",
            str(line.nodes),
            "" if line.gap is None else f"{line.gap:.2%}",
            f"{line.seconds:.1f}",
            *_simulated(line),
        )
        case = line.case
    console.print(table)


def _simulated(line: Line) -> tuple[str, ...]:
    if line.goodput_tokens_per_s is None:
        return ()
    met = "" if line.attainment is None else f"{line.attainment:.1%}"
    return met, f"{line.goodput_tokens_per_s:.0f}"


def _print_ratios(console: Console, result: Comparison, engine: Engine) -> None:
    from tasks.comparison_view import ratios

    against = Table("against Coral", "cases", "cost (median)", "cost (max)", "cases",
                    "goodput (median)", "goodput (max)", "serves nothing")  # fmt: skip
    for ratio in ratios(result.lines):
        if ratio.engine is not engine:
            continue
        against.add_row(
            ratio.planner,
            str(ratio.cost_cases),
            *(_times(value) for value in (ratio.cost_median, ratio.cost_max)),
            str(ratio.goodput_cases),
            *(_times(value) for value in (ratio.goodput_median, ratio.goodput_max)),
            str(ratio.nothing_cases),
        )
    console.print(against)


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"

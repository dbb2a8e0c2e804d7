"""What `coral serve-local` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from coral.console import make_console
from coral.render import print_round, round_summary

if TYPE_CHECKING:
    from flows.serve_local import LocalRun
    from tasks.local_run import Served


def local_summary(result: LocalRun) -> dict[str, Any]:
    """The JSON object of a local run; times in ms."""
    return {
        "round": round_summary(result.round),
        "replicas": result.replicas,
        "served": [
            {
                "workload": one.workload.name,
                "concurrency": one.concurrency,
                "measured": asdict(one.measured),
                "planned": asdict(one.planned),
            }
            for one in result.served
        ],
    }


def print_local(result: LocalRun) -> None:
    """Measured figures beside the planned ones."""
    console = make_console()
    print_round(result.round)
    decision = result.round.decision
    for replica in decision.coral.replicas if decision is not None else ():
        console.print(f"{replica.template.workload}: {replica.template.placement.describe()}")
    table = Table(title="Measured through the gateway")
    for name in ("workload", "figure", "measured", "planned"):
        table.add_column(name, justify="left" if name in {"workload", "figure"} else "right")
    for one in result.served:
        for name, measured, planned in _rows(one):
            table.add_row(one.workload.name, name, measured, planned)
        table.add_section()
    console.print(table)
    console.print(
        "Planned: full replicas at mean lengths, no queue. All that was started has ended."
    )
    for one in result.served:
        for error in one.measured.errors:
            console.print(f"[bold red]{one.workload.name}: {error}[/bold red]")


def _rows(one: Served) -> list[tuple[str, str, str]]:
    seen, plan, slo = one.measured, one.planned, one.workload.slo
    failed = f", {seen.failed} failed" if seen.failed else ""
    return [
        ("requests", f"{seen.requests}{failed}", ""),
        ("in flight", str(one.concurrency), str(plan.in_flight)),
        ("output tokens/s", f"{seen.output_tokens_per_s:.1f}", f"{plan.output_tokens_per_s:.1f}"),
        ("TTFT mean, ms", f"{seen.ttft_mean_ms:.0f}", f"{plan.ttft_ms:.0f}"),
        ("TTFT p95, ms", f"{seen.ttft_p95_ms:.0f}", f"at most {slo.ttft_ms:.0f}"),
        ("TPOT mean, ms", f"{seen.tpot_mean_ms:.1f}", f"{plan.tpot_ms:.1f}"),
        ("TPOT p95, ms", f"{seen.tpot_p95_ms:.1f}", f"at most {slo.tpot_ms:.0f}"),
    ]

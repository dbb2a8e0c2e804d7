"""What `coral simulate` prints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from coral.console import make_console

if TYPE_CHECKING:
    from simulator.measures import WorkloadMeasures
    from tasks.simulation import Simulation


def simulation_summary(found: Simulation) -> dict[str, Any]:
    """The JSON object of a simulation."""
    result = found.result
    return {
        "scenario": found.scenario,
        "decision_id": found.decision_id,
        "simulation_id": found.id,
        "trace": found.load.name,
        "minutes": round(found.minutes, 3),
        "load": found.load.factor,
        "seed": found.load.seed,
        "requests": result.trace.requests,
        "replicas": found.replicas,
        "engines": found.engines,
        "cost_usd_per_hour": found.cost_usd_per_hour,
        "attainment": found.attainment,
        "goodput_tokens_per_s": found.goodput_tokens_per_s,
        "usd_per_million_good_tokens": found.usd_per_million_good_tokens
        if found.goodput_tokens_per_s
        else None,
        "workloads": {
            measured.workload: {
                "planned": asdict(found.planned[measured.workload]),
                "simulated": asdict(measured),
            }
            for measured in found.simulated
        },
        "utilization_by_class": _by_class(found),
        "iterations": result.iterations,
        "simulate_s": round(result.wall_s, 3),
        "report": str(found.report) if found.report else None,
        "events": str(found.events) if found.events else None,
    }


def print_simulation(found: Simulation) -> None:
    """Planned and simulated figures per workload, what was lost, and how busy the nodes were."""
    console = make_console()
    table = Table(
        title=f"Plan of scenario {found.scenario} under {found.load.name}, "
        f"{found.minutes:.1f} minutes",
        title_justify="left",
    )
    for name in (
        "workload", "requests/s", "met both", "goodput tok/s", "planned tok/s", "TTFT p50 / p95 ms",
        "TPOT p50 / p95 ms", "planned TPOT",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "workload" else "right")
    for measured in found.simulated:
        planned = found.planned[measured.workload]
        table.add_row(
            measured.workload,
            f"{measured.offered_rps:.2f}",
            f"{measured.attainment:.1%}",
            f"{measured.goodput_tokens_per_s:.0f}",
            f"{planned.output_tokens_per_s:.0f}",
            _pair(measured.ttft_ms),
            _pair(measured.tpot_ms),
            "-" if planned.tpot_ms is None else f"{planned.tpot_ms:.1f}",
        )
    console.print(table)
    for measured in found.simulated:
        for line in _losses(measured):
            console.print(line)
    for name, share in _by_class(found).items():
        console.print(f"{name}: busy {share:.0%} of the time")
    cost = f"${found.cost_usd_per_hour:.2f}/h"
    if found.goodput_tokens_per_s:
        cost += f", ${found.usd_per_million_good_tokens:.2f} per million tokens within both SLOs"
    console.print(cost)
    if found.events:
        console.print(f"Requests one by one: {found.events}", soft_wrap=True)
    if found.report:
        console.print(f"Report: {found.report}", soft_wrap=True)


def simulated_summary(found: Simulation) -> dict[str, Any]:
    """What quickstart's JSON object says of the simulation."""
    return {
        "simulated_minutes": round(found.minutes, 3),
        "simulated_attainment": found.attainment,
        "simulated_attainment_by_workload": {m.workload: m.attainment for m in found.simulated},
        "simulated_goodput_tokens_per_s": found.goodput_tokens_per_s,
        "planned_output_tokens_per_s": _planned_tokens_per_s(found),
        "simulation_report": str(found.report) if found.report else None,
    }


def print_in_brief(found: Simulation, calibrated: bool) -> None:
    """Attainment and goodput beside the plan, in two lines; one more where caps are assumed."""
    console = make_console()
    shares = ", ".join(f"{m.workload} {m.attainment:.1%}" for m in found.simulated if m.requests)
    console.print(
        f"In simulation ({found.minutes:.0f} minutes of requests at the demand): within both SLOs "
        f"{shares}; {found.goodput_tokens_per_s:.0f} output tokens/s of them, "
        f"{_planned_tokens_per_s(found):.0f} planned."
    )
    if not calibrated:
        console.print(
            "How full replicas may be is assumed: `coral calibrate-caps` finds at what load 95% "
            "of the requests are in time, and later plans use it."
        )
    if found.report:
        console.print(f"Simulation: {found.report}", soft_wrap=True)


def _planned_tokens_per_s(found: Simulation) -> float:
    return sum(planned.output_tokens_per_s for planned in found.planned.values())


def _losses(measured: WorkloadMeasures) -> list[str]:
    name, found = measured.workload, []
    if measured.lost:
        found.append(f"{measured.lost} requests of {name} were lost: the plan has no replica of it")
    if measured.too_long:
        found.append(f"{measured.too_long} requests of {name} are longer than any KV pool: refused")
    if measured.failed:
        found.append(f"{measured.failed} requests of {name} failed with their nodes")
    if measured.unfinished:
        found.append(f"{measured.unfinished} requests of {name} did not end")
    if measured.preemptions:
        found.append(f"{name}: {measured.preemptions} preemptions")
    return found


def _by_class(found: Simulation) -> dict[str, float]:
    """Mean utilisation of the lanes of every node class."""
    shares: dict[str, list[float]] = defaultdict(list)
    for lane in found.lanes:
        shares[lane.node_class].append(lane.utilization)
    return {name: sum(values) / len(values) for name, values in sorted(shares.items())}


def _pair(quantiles: Mapping[str, float]) -> str:
    return f"{quantiles['p50']:.0f} / {quantiles['p95']:.0f}" if quantiles else "-"

"""What `coral calibrate-caps` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from coral.console import make_console
from planner.caps import ANY

if TYPE_CHECKING:
    from tasks.calibration import Calibration, Round


def calibration_summary(found: Calibration) -> dict[str, Any]:
    """The JSON object of a calibration."""
    return {
        "scenario": found.scenario,
        "target": found.target,
        "attained": found.attained,
        "caps": _by_name(found.chosen),
        "assumed": {phase.value: cap for phase, cap in found.assumed.items()},
        "cost_usd_per_hour": found.chosen.cost_usd_per_hour,
        "attainment": dict(found.chosen.attainment),
        "rounds": [{**asdict(each), "caps": _by_name(each)} for each in found.rounds],
    }


def print_calibration(found: Calibration) -> None:
    """Caps and attainment by workload, and what every round's plan cost."""
    console = make_console()
    table = Table(title=f"Utilisation caps of scenario {found.scenario}", title_justify="left")
    for name in ("workload", "phase", "template", "cap", "assumed", "met both"):
        left = name in {"workload", "phase", "template"}
        table.add_column(name, justify="left" if left else "right")
    last = None
    for (name, phase, template), cap in sorted(found.chosen.caps.items()):
        met = found.chosen.attainment.get(name)
        table.add_row(
            name if name != last else "",
            phase.value,
            template[:8] if template != ANY else "any other",
            f"{cap:.1%}",
            f"{found.assumed[phase]:.0%}",
            f"{met:.1%}" if met is not None and name != last else "",
        )
        last = name
    console.print(table)
    for number, each in enumerate(found.rounds, start=1):
        worst = min(each.attainment.values(), default=1.0)
        mark = "  <- kept" if each is found.chosen else ""
        console.print(
            f"Plan {number}: ${each.cost_usd_per_hour:.2f}/h, {each.served_share:.1%} served, "
            f"least attainment {worst:.1%}, {each.measured} new caps{mark}"
        )
    if not found.attained:
        console.print(
            f"[bold red]No plan attained {found.target:.0%} for every workload[/bold red]: the "
            "caps of the nearest one are kept; more --rounds may help, or looser objectives."
        )
    console.print("Plans of this scenario use these caps from now on.")


def _by_name(found: Round) -> dict[str, dict[str, dict[str, float]]]:
    """By workload, phase and template; 'any' is for those without one of their own."""
    caps: dict[str, dict[str, dict[str, float]]] = {}
    for (name, phase, template), cap in sorted(found.caps.items()):
        caps.setdefault(name, {}).setdefault(phase.value, {})[template or "any"] = cap
    return caps

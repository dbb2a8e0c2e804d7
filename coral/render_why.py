"""What `coral explain` and `coral allocate --what-if` print."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from coral.console import make_console
from coral.render import binding_text
from planner.allocation.plan import Plan

if TYPE_CHECKING:
    from planner.allocation.explain import EntryPrice
    from tasks.explain import Explanation
    from tasks.what_if import WhatIf

SHOWN_WORTH = 0.005  # USD/hour or requests/s; less is nothing


def explanation_summary(found: Explanation) -> dict[str, Any]:
    """The JSON object of an explanation."""
    without = found.without
    return {
        **found.recorded,
        "still_allowed": found.plan is not None,
        "cost_by_workload": dict(found.cost_by_workload),
        "entry_prices": [
            {
                "domain": entry.offer.domain,
                "instance_type": entry.offer.instance_type,
                "node_class": entry.offer.node_class,
                "market": entry.offer.market.value,
                "price_usd_per_hour": entry.offer.price_usd_per_hour,
                "enters_below_usd_per_hour": entry.usd_per_hour,
            }
            for entry in found.entry_prices
        ],
        "without": None if without is None else _plan_figures(without),
    }


def print_explanation(found: Explanation) -> None:
    """The latest plan: what it costs and serves, what binds, what more or less would change."""
    console, recorded = make_console(), found.recorded
    console.print(
        f"Plan of {recorded['created_at']} for scenario {recorded['scenario']}: "
        f"[bold]${recorded['cost_usd_per_hour']:.2f}/h[/bold], "
        f"{recorded['served_share']:.2%} served, gap {recorded['gap']:.2%}."
    )
    _print_shortfalls(console, recorded)
    _print_costs(console, found)
    console.print("What binds:" if recorded["binding"] else "Nothing binds.")
    for row in recorded["binding"]:
        console.print(f"  {binding_text(**row)}")
    _print_class_worth(console, recorded)
    if found.plan is None:
        console.print(
            "[yellow]Today's market or demand no longer allows this plan; run `coral allocate`."
            "[/yellow]"
        )
    if found.entry_prices:
        console.print("GPU types that the plan does not use, and the price at which each would be:")
        for entry in found.entry_prices:
            console.print(f"  {describe_entry(entry)}")
    if found.without is not None:
        _print_without(console, found.without, recorded)


def describe_entry(entry: EntryPrice) -> str:
    """'H100 x8 (p5.48xlarge) on-demand in aws:us-east-1: below $40.10/h, 18.3% under today's'."""
    offer = entry.offer
    text = (
        f"{offer.node_class} ({offer.instance_type}) {offer.market.value.replace('_', '-')} "
        f"in {offer.domain}: "
    )
    if entry.usd_per_hour <= 0.0:
        return text + f"at no price (${offer.price_usd_per_hour:.2f}/h today)"
    if entry.share > 0.9999:
        return text + f"at today's ${offer.price_usd_per_hour:.2f}/h, were replicas divisible"
    return (
        text + f"below ${entry.usd_per_hour:.2f}/h, {1.0 - entry.share:.1%} under today's "
        f"${offer.price_usd_per_hour:.2f}"
    )


def what_if_summary(found: WhatIf) -> dict[str, Any]:
    """The JSON object of a what-if."""
    return {
        "scenario": found.scenario,
        "files": list(found.files),
        "now": _plan_figures(found.now),
        "what_if": _plan_figures(found.then),
        "node_changes": [asdict(change) for change in found.changes],
    }


def print_what_if(found: WhatIf) -> None:
    """Both plans side by side, and the nodes that differ."""
    console = make_console()
    now, then = found.now, found.then
    table = Table("", "now", "what if", title=f"Scenario {found.scenario}", title_justify="left")
    rows: list[tuple[str, str, str]] = [
        ("USD/hour", f"{now.cost_usd_per_hour:.2f}", f"{then.cost_usd_per_hour:.2f}"),
        ("served", f"{now.served_share:.2%}", f"{then.served_share:.2%}"),
        ("nodes", str(_nodes(now)), str(_nodes(then))),
        ("gap", f"{now.gap:.2%}", f"{then.gap:.2%}"),
    ]
    for before, after in zip(now.services, then.services, strict=True):
        if before.short_rps > 0 or after.short_rps > 0 or before.demand_rps != after.demand_rps:
            rows.append((f"{before.workload} requests/s", _service(before), _service(after)))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if not found.changes:
        console.print("The same nodes.")
    for change in found.changes:
        console.print(f"  {change.node_class} in {change.domain}: {change.now} -> {change.then}")
    console.print("Nothing was recorded.")


def _service(service: Any) -> str:
    return f"{service.served_rps:.2f} of {service.demand_rps:.2f}"


def _nodes(plan: Plan) -> int:
    return sum(nodes.count for nodes in plan.nodes)


def _plan_figures(plan: Plan) -> dict[str, Any]:
    return {
        "cost_usd_per_hour": round(plan.cost_usd_per_hour, 4),
        "served": round(plan.served_share, 6),
        "served_by_workload": {s.workload: round(s.share, 6) for s in plan.services},
        "nodes": _nodes(plan),
        "gap": round(plan.gap, 6),
        "proven": plan.proven,
        "solve_s": round(plan.solve_s, 3),
    }


def _print_shortfalls(console: Console, recorded: Any) -> None:
    for service in recorded["services"]:
        short = service["demand_rps"] - service["served_rps"]
        if short > 0:
            console.print(
                f"[bold red]{service['workload']}[/bold red] falls short by {short:.2f} of "
                f"{service['demand_rps']:.2f} requests/s."
            )


def _print_costs(console: Console, found: Explanation) -> None:
    if found.cost_by_workload:
        costs = sorted(found.cost_by_workload.items(), key=lambda item: -item[1])
        console.print("Cost by workload: " + ", ".join(f"{w} ${c:.2f}/h" for w, c in costs) + ".")
    parts = [
        f"{row['nodes']} {row['node_class']} {row['market'].replace('_', '-')} "
        f"${row['usd_per_hour']:.2f}/h"
        for row in found.recorded["cost_by_class"]
    ]
    console.print("Cost by node class: " + (", ".join(parts) or "no nodes") + ".")


def _print_class_worth(console: Console, recorded: Any) -> None:
    """One more node of each class, the worthless ones in one line."""
    worth = [row for row in recorded["class_worth"] if row["worth"] >= SHOWN_WORTH]
    nothing = [row["node_class"] for row in recorded["class_worth"] if row["worth"] < SHOWN_WORTH]
    if worth:
        console.print("One more node would be worth about:")
    for row in worth:
        amount = f"{row['worth']:.2f}"
        amount = f"${amount}/h" if row["worth_unit"] == "USD/hour" else f"{amount} requests/s"
        console.print(f"  {row['node_class']}: {amount} (in {row['domain']})")
    if nothing:
        console.print(f"One more of these nothing: {', '.join(nothing)}.")


def _print_without(console: Console, plan: Plan, recorded: Any) -> None:
    more = plan.cost_usd_per_hour - recorded["cost_usd_per_hour"]
    line = f"Without it the best plan found costs ${plan.cost_usd_per_hour:.2f}/h"
    line += f" ({'+' if more >= 0 else '-'}${abs(more):.2f}/h)"
    line += f" and serves {plan.served_share:.2%}; gap {plan.gap:.2%}."
    console.print(line)

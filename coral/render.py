"""What commands print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coral.console import make_console
from planner.allocation.explain import replica_cost
from planner.allocation.options import ServiceRules
from planner.allocation.plan import Binding, Plan, PlannedReplicas
from planner.types import Market, Provenance, Template

if TYPE_CHECKING:
    from flows.allocate import AllocationResult
    from flows.build_library import LibraryResult
    from tasks.operating import Round
    from tasks.sensitivity import Sensitivity

SHOWN_NAMES = 6


def summary(result: AllocationResult) -> dict[str, Any]:
    """The JSON object of an allocation."""
    decision = result.decision
    coral, homo = decision.coral, decision.homo_joint
    return {
        "scenario": result.inputs.scenario.name,
        "templates": decision.templates,
        "cost_usd_per_hour": round(coral.cost_usd_per_hour, 4),
        "homo_joint_usd_per_hour": round(homo.cost_usd_per_hour, 4),
        "served": round(coral.served_share, 6),
        "homo_joint_served": round(homo.served_share, 6),
        "served_by_workload": {s.workload: round(s.share, 6) for s in coral.services},
        "replicas": sum(planned.count for planned in coral.replicas),
        "nodes": sum(planned.count for planned in coral.nodes),
        "solve_s": round(coral.solve_s, 3),
        "gap": round(coral.gap, 6),
        "proven": coral.proven,
        "stock": result.inputs.scenario.stock_note,
        "caps": "calibrated" if result.inputs.caps else "assumed",
        "decision_id": decision.decision_id,
        "report": str(decision.report),
        "database": result.database,
    }


def library_summary(result: LibraryResult) -> dict[str, Any]:
    """The JSON object of a library build."""
    return {
        "scenario": result.scenario,
        "templates": result.templates,
        "combinations": sum(phase.combinations for phase in result.phases),
        "solved": sum(phase.solved for phase in result.phases),
        "reused": sum(phase.reused for phase in result.phases),
        "pruned": sum(phase.pruned for phase in result.phases),
        "outcomes": result.outcomes,
        "seconds": round(result.seconds, 3),
    }


def print_library(result: LibraryResult) -> None:
    """How large the library is and how it was got."""
    console = make_console()
    table = Table(title=f"Template library of scenario {result.scenario}", title_justify="left")
    for column in ("workload", "phase"):
        table.add_column(column)
    for column in ("combinations", "reused", "pruned", "searched", "templates", "outside SLO", "s"):
        table.add_column(column, justify="right")
    from planner.placement.solution import Outcome

    for phase in result.phases:
        table.add_row(
            phase.workload,
            phase.phase.value,
            f"{phase.combinations:,}",
            f"{phase.reused:,}",
            f"{phase.pruned:,}",
            f"{phase.searched:,}",
            f"{phase.kept:,}",
            f"{phase.outcomes.get(Outcome.INFEASIBLE, 0):,}",
            f"{phase.seconds:.1f}",
        )
    console.print(table)
    left_out: dict[str, int] = {}
    for phase in result.phases:
        for reason, count in phase.left_out.items():
            left_out[reason] = left_out.get(reason, 0) + count
    reasons = ", ".join(f"{count:,} with {reason}" for reason, count in left_out.items() if count)
    console.print(
        f"{result.templates:,} templates in {result.seconds:.1f} s. A combination gets none when "
        "two smaller ones that make it up serve as much, or nothing meets the SLO; for pruned ones "
        "bounds were enough to know." + (f" Never solved: {reasons}." if reasons else "")
    )
    unproven = sum(phase.unproven for phase in result.phases)
    if unproven:
        console.print(
            f"[yellow]{unproven} combinations stopped at an ILP's time limit: their templates are "
            "feasible, better ones may exist.[/yellow]"
        )
    console.print()


def sensitivity_summary(result: Sensitivity) -> dict[str, Any]:
    """What `--json` prints of a sweep."""
    from tasks.sensitivity import BEST, CLASS_MEAN, plateau

    return {
        "by_nodes": [asdict(point) for point in result.by_nodes],
        "by_memory": [asdict(point) for point in result.by_memory],
        "plateau_nodes": int(plateau(result.by_nodes, "max_nodes", BEST)),
        "plateau_memory_ratio": plateau(result.by_memory, "memory_ratio", BEST),
        "class_plateau_nodes": int(plateau(result.by_nodes, "max_nodes", CLASS_MEAN)),
        "class_plateau_memory_ratio": plateau(result.by_memory, "memory_ratio", CLASS_MEAN),
        "plot": str(result.plot),
    }


def print_sensitivity(result: Sensitivity) -> None:
    """Best tokens per dollar by N_max, and where both caps stop to matter."""
    from tasks.sensitivity import BEST, CLASS_MEAN, plateau

    console = make_console()
    caps = sorted({point.max_nodes for point in result.by_nodes})
    table = Table(title="Best tokens per USD by most nodes of a replica", title_justify="left")
    table.add_column("workload")
    table.add_column("phase")
    for cap in caps:
        table.add_column(str(cap), justify="right")
    rows: dict[tuple[str, str], dict[int, float]] = {}
    for point in result.by_nodes:
        row = rows.setdefault((point.workload, point.phase.value), {})
        row[point.max_nodes] = point.tokens_per_usd
    for (workload, phase), values in rows.items():
        table.add_row(workload, phase, *(f"{values[cap]:,.0f}" for cap in caps))
    console.print(table)
    for what, value in (("the best template", BEST), ("the mean over node classes", CLASS_MEAN)):
        nodes = plateau(result.by_nodes, "max_nodes", value)
        ratio = plateau(result.by_memory, "memory_ratio", value)
        console.print(
            f"By {what}, every phase is within 0.5% of its most from {nodes:.0f} nodes and from "
            f"{ratio:g} times the model's memory on."
        )
    console.print(
        "The mean takes, for every node class, the best template that uses it: what the class is "
        f"worth where the best ones are sold out.\nPlot: {result.plot}"
    )


def print_plan(result: AllocationResult) -> None:
    """The plan, its cost beside Homo-joint's, what binds and where the data lies."""
    console = make_console()
    scenario, decision = result.inputs.scenario, result.decision
    plan = decision.coral
    demand = {service.workload: service.demand_rps for service in plan.services}
    table = Table(title=f"Plan for scenario {scenario.name}", title_justify="left")
    table.add_column("domain")
    table.add_column("market")
    table.add_column("template", overflow="fold")
    table.add_column("replicas", justify="right")
    table.add_column("$/h", justify="right")
    table.add_column("share of demand", justify="right")
    shown = sorted(plan.replicas, key=lambda r: (r.template.workload, r.template.phase, r.domain))
    for planned in shown:
        shares = [
            f"{rps / demand[name]:.1%}" + (f" {name}" if len(planned.load_rps) > 1 else "")
            for name, rps in planned.load_rps.items()
        ]
        table.add_row(
            planned.domain,
            _markets(plan, planned),
            describe_template(planned.template),
            str(planned.count),
            f"{replica_cost(plan, planned):.2f}",
            ", ".join(shares),
        )
    console.print(table)
    _print_services(console, plan)
    for name, forecast in scenario.forecasts.items():
        console.print(
            f"Demand of {name} is a forecast: {forecast.rate_rps / forecast.level_rps:.2f} times "
            "the latest level."
        )
    for line in describe_rules(scenario.rules, plan):
        console.print(line)
    if result.inputs.caps:
        from tasks.report import describe_caps

        console.print(describe_caps(result.inputs))
    if result.inputs.corrections:
        from tasks.report import describe_corrections

        console.print(describe_corrections(result.inputs))
    _print_cost(console, result)
    _print_binding(console, result)
    _print_sources(console, result)
    console.print(f"Report: {decision.report}")
    console.print(f'Database: {result.database}  (ask it with: coral sql "FROM best_templates")')


def describe_template(template: Template) -> str:
    """'decode Qwen3-32B: [L40S x1 | layers 0-39] -> [2x L4 x1 | 40-63]'."""
    return f"{template.phase} {template.workload}: {template.placement.describe()}"


def describe_binding(found: Binding) -> str:
    """'H100 x8 (p5.48xlarge) in aws:us-east-1: all 1 used; one more would save about $27/h'."""
    limit = found.limit
    return binding_text(
        limit.kind,
        limit.text,
        found.used,
        limit.amount,
        limit.unit,
        found.worth,
        found.worth_unit,
    )


def binding_text(
    kind: str, text: str, used: float, amount: float, unit: str, worth: float, worth_unit: str
) -> str:
    """A binding limit in words; the values are those of the table allocation_binding."""
    if kind in {"stock", "owned"}:
        text += f": all {amount:g} used"
    elif kind in {"quota", "budget"}:
        text += f": {used:g} used"
    if worth >= 0.005:
        one = "node" if unit == "nodes" else unit.removesuffix("s")
        if worth_unit == "USD/hour":
            text += f"; one more {one} would save about ${worth:.2f}/h"
        else:
            text += f"; one more {one} would serve about {worth:.2f} requests/s more"
    return text


def round_summary(result: Round) -> dict[str, Any]:
    """The JSON object of one round of operation."""
    return {
        "planned": result.decision is not None,
        "why": result.why,
        "launched": result.applied.launched,
        "failed": result.applied.failed,
        "terminated": result.applied.terminated,
        "held_back": result.applied.held_back,
        "refused": result.applied.refused,
        "reasons": list(result.applied.why),
        "calls": None if result.calls is None else list(result.calls),
        "replicas_kept": len(result.replicas.kept),
        "replicas_started": len(result.replicas.started),
        "replicas_ended": len(result.replicas.ended),
        "replicas_waiting": result.waiting,
        "short_rps": {name: round(rps, 4) for name, rps in result.short_rps.items()},
        "stopped": result.stopped,
        "nodes": result.nodes,
        "cost_usd_per_hour": round(result.cost_usd_per_hour, 4),
        "decision_id": result.decision.decision_id if result.decision else None,
        "demand_files": result.demand.files,
        "demand_files_broken": list(result.demand.broken),
        "corrections": dict(result.learned.factors),
        "corrections_changed": list(result.learned.changed),
        "drifts": list(result.learned.drifts),
        "lengths_off": list(result.learned.lengths),
    }


def print_round(result: Round) -> None:
    """What one round of operation did."""
    applied = result.applied
    console = make_console()
    why = f"{result.why[0].upper()}{result.why[1:]}."
    console.print(f"[bold red]{why}[/bold red]" if result.stopped else why)
    if result.calls is not None:
        _print_calls(console, result.calls)
    elif not applied.nothing:
        failed = f", {applied.failed} failed to launch" if applied.failed else ""
        held = f", {applied.held_back} held back" if applied.held_back else ""
        console.print(
            f"{applied.launched} launched{failed}{held}, {applied.terminated} terminated."
        )
    for reason in applied.why:
        console.print(f"  [yellow]{reason}[/yellow]")
    for broken in result.demand.broken:
        console.print(f"  [yellow]set aside in inbox/broken: {escape(broken)}[/yellow]")
    for line in result.learned.changed:
        console.print(escape(f"Corrected: {line}."))
    for warning in (*result.learned.drifts, *result.learned.lengths):
        console.print(f"  [yellow]{escape(warning)}[/yellow]")
    changes = result.replicas
    if changes.started or changes.ended:
        console.print(
            f"{'Planned replicas' if result.calls is not None else 'Replicas'}: "
            f"{len(changes.kept)} kept, {len(changes.started)} started, "
            f"{len(changes.ended)} ended."
        )
    if result.waiting:
        console.print(f"{result.waiting} replicas stay until those that follow them serve.")
    for name, rps in result.short_rps.items():
        console.print(
            f"  [yellow]{rps:.2f} requests/s of {name} less can be served until what comes up "
            "serves[/yellow]"
        )
    then = "After that: " if result.calls is not None else ""
    console.print(f"{then}{result.nodes} nodes held, ${result.cost_usd_per_hour:.2f}/h.")


def _print_calls(console: Console, calls: Sequence[str]) -> None:
    """What a fleet would be asked, equal calls together."""
    console.print("Nothing was done. The fleet would be asked to:" if calls else "Nothing to do.")
    for call, count in Counter(calls).items():
        console.print(f"  {call}" + (f" (x{count})" if count > 1 else ""))


def describe_rules(rules: Mapping[str, ServiceRules], plan: Plan) -> list[str]:
    """What the scenario asks of single workloads, where that shapes the plan in no limit's row."""
    lines = [
        f"{name} may be served only in {', '.join(sorted(rule.domains))}."
        for name, rule in sorted(rules.items())
        if rule.domains is not None
    ]
    if plan.egress_usd_per_hour > 0:
        lines.append(
            f"Traffic that leaves for its origin costs ${plan.egress_usd_per_hour:.2f}/h of egress "
            "besides."
        )
    return lines


def _print_services(console: Console, plan: Plan) -> None:
    for service in plan.services:
        if service.short_rps > 0:
            console.print(
                f"[bold red]{service.workload}[/bold red] falls short: {service.served_rps:.2f} "
                f"of {service.demand_rps:.2f} requests/s ({service.share:.1%}) can be served."
            )
    if all(service.short_rps <= 0 for service in plan.services):
        rates = ", ".join(f"{s.workload} {s.demand_rps:g}" for s in plan.services)
        console.print(f"All demand is served (requests/s: {rates}).")


def _print_cost(console: Console, result: AllocationResult) -> None:
    coral, homo = result.decision.coral, result.decision.homo_joint
    line = f"Cost: [bold]${coral.cost_usd_per_hour:.2f}/h[/bold]"
    line += f"; Homo-joint on the same input: ${homo.cost_usd_per_hour:.2f}/h"
    if abs(coral.served_share - homo.served_share) > 1e-6:
        line += f", serving {homo.served_share:.2%} instead of {coral.served_share:.2%}"
    elif homo.cost_usd_per_hour:
        saving = 1.0 - coral.cost_usd_per_hour / homo.cost_usd_per_hour
        line += f" ({saving:.1%} saved)"
    console.print(line + ".")
    state = "proven" if coral.proven else "stopped at the deadline"
    console.print(
        f"Solved in {coral.solve_s:.1f} s with {result.decision.templates} templates; "
        f"gap {coral.gap:.2%} ({state})."
    )


def _print_binding(console: Console, result: AllocationResult) -> None:
    """Stock that the plan uses up, most valuable first."""
    plan = result.decision.coral
    if not plan.binding:
        if plan.weighted_shortfall > 0:
            console.print(
                "No stock is used up, yet no replica fits what is left: the smallest one needs "
                "more nodes than any one domain has."
            )
        else:
            console.print("Nothing binds: the plan uses up no stock.")
        return
    console.print(f"What binds (stock is {result.inputs.scenario.stock_note}):")
    for found in plan.binding:
        console.print(f"  {describe_binding(found)}")


def _print_sources(console: Console, result: AllocationResult) -> None:
    replicas = result.decision.coral.replicas
    by_source = {
        source: sum(r.count for r in replicas if r.template.provenance is source)
        for source in Provenance
    }
    parts = ", ".join(f"{count} {source}" for source, count in by_source.items() if count)
    rejected = {k: n for k, n in result.inputs.offers_rejected.items() if k}
    reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.items())
    accepted = result.inputs.offers_rejected.get("", 0)
    console.print(
        f"Performance numbers behind the replicas, by their worst source: {parts or 'none'}."
    )
    seen = result.inputs.prices_at
    age = datetime.now(UTC) - seen
    console.print(
        f"Prices of {seen:%Y-%m-%d %H:%M} UTC ({_age(age)} old): {accepted} accepted, "
        f"{sum(rejected.values())} rejected{f' ({reasons})' if reasons else ''}."
    )
    for feed in result.inputs.feeds:
        if feed.note:
            console.print(f"[yellow]{feed.note[0].upper()}{feed.note[1:]}.[/yellow]")
    if result.inputs.scenario.avoided:
        console.print(f"Avoided for now: {result.inputs.scenario.avoided}.")
    unpriced = result.inputs.scenario.unpriced
    if unpriced:
        more = f" and {len(unpriced) - SHOWN_NAMES} more" if len(unpriced) > SHOWN_NAMES else ""
        console.print(f"No price, so not planned with: {', '.join(unpriced[:SHOWN_NAMES])}{more}.")


def _age(age: timedelta) -> str:
    hours = age.total_seconds() / 3600.0
    if hours < 2:
        return f"{60 * hours:.0f} minutes"
    return f"{hours:.0f} hours" if hours < 48 else f"{hours / 24:.0f} days"


def _markets(plan: Plan, planned: PlannedReplicas) -> str:
    """Markets in which the replica's node classes are rented in its domain."""
    classes = {name for name, _ in planned.template.combination}
    found = {
        nodes.offer.market
        for nodes in plan.nodes
        if nodes.offer.domain == planned.domain and nodes.offer.node_class in classes
    }
    return "+".join(market.value.replace("_", "-") for market in Market if market in found)

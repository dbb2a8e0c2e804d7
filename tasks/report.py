"""The report of one decision: a static page that reads offline, light and dark, on any width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from matplotlib.figure import Figure

from planner.allocation.explain import cost_by_workload
from planner.allocation.plan import Plan
from planner.caps import ANY
from planner.types import Market, Phase, Template
from tasks.inputs import Inputs
from tasks.page import BASELINE, MIXED, PURE, WIDE_IN, margins, svg, write_page


@dataclass(frozen=True)
class Decision:
    """Coral's plan beside Homo-joint's on the same input."""

    coral: Plan
    homo_joint: Plan
    templates: int  # in the library
    decision_id: str
    report: Path


@dataclass(frozen=True, slots=True)
class _Number:
    """One performance number that the plan rests on."""

    model: str
    node_class: str
    tensor_parallel_size: int
    provenance: str
    source: str


def write_report(
    path: Path,
    inputs: Inputs,
    decision: Decision,
    templates: Sequence[Template],
    made_at: datetime,
) -> None:
    """Write the page, whole or not at all."""
    scenario, plan = inputs.scenario, decision.coral
    write_page(
        path,
        "report.html",
        scenario=scenario,
        decision=decision,
        plan=plan,
        homo=decision.homo_joint,
        made_at=made_at.isoformat(timespec="minutes"),
        rows=_plan_rows(plan),
        costs=[
            (name, cost, cost_by_workload(decision.homo_joint).get(name, 0.0))
            for name, cost in cost_by_workload(plan).items()
        ],
        cost_chart=svg(_cost_figure(plan, decision.homo_joint)),
        template_chart=svg(_template_figure(templates, _class_prices(inputs))),
        numbers=_numbers(inputs, plan),
        assumptions=[*_assumptions(inputs), *_market_notes(inputs), *inputs.notes],
        prices_at=inputs.prices_at.isoformat(timespec="minutes"),
        rejected={k: n for k, n in inputs.offers_rejected.items() if k},
        accepted=inputs.offers_rejected.get("", 0),
    )


def _plan_rows(plan: Plan) -> list[tuple[str, str, str, int, str]]:
    demand = {service.workload: service.demand_rps for service in plan.services}
    return [
        (
            planned.domain,
            f"{planned.template.phase} {planned.template.workload}",
            planned.template.placement.describe(),
            planned.count,
            ", ".join(f"{rps / demand[n]:.0%} of {n}" for n, rps in planned.load_rps.items()),
        )
        for planned in sorted(
            plan.replicas, key=lambda r: (r.template.workload, r.template.phase, r.domain)
        )
    ]


def _class_prices(inputs: Inputs) -> dict[str, float]:
    prices: dict[str, float] = {}
    for offer in inputs.scenario.offers:
        if offer.market is not Market.OWNED:
            known = prices.get(offer.node_class, offer.price_usd_per_hour)
            prices[offer.node_class] = min(known, offer.price_usd_per_hour)
    return prices


def _cost_figure(plan: Plan, homo: Plan) -> Figure:
    ours, theirs = cost_by_workload(plan), cost_by_workload(homo)
    names = list(ours)
    figure = Figure(figsize=(WIDE_IN, 0.62 * len(names) + 0.9))
    axes = figure.subplots()
    margins(figure, left=0.3 + 0.085 * max(map(len, names), default=0), bottom=0.55, top=0.3)
    rows = range(len(names))
    axes.barh([r - 0.2 for r in rows], [ours[n] for n in names], 0.38, color=PURE, label="Coral")
    axes.barh(
        [r + 0.2 for r in rows],
        [theirs[n] for n in names],
        0.38,
        color=BASELINE,
        label="Homo-joint",
    )
    axes.set_yticks(list(rows), names)
    axes.invert_yaxis()
    axes.set_xlabel("USD per hour")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="upper right", ncols=2, frameon=False)
    return figure


def _template_figure(templates: Sequence[Template], prices: dict[str, float]) -> Figure:
    """Requests per dollar of every template, against the best of its workload and phase."""
    phases = [phase for phase in Phase if any(t.phase is phase for t in templates)]
    figure = Figure(figsize=(WIDE_IN, 1.1 + 1.9 * len(phases)))
    grid = figure.subplots(len(phases), 1, sharex=True, squeeze=False)
    margins(figure, left=0.75, bottom=0.5, top=0.55)
    figure.subplots_adjust(hspace=0.25)
    for axes, phase in zip(grid[:, 0], phases, strict=True):
        mine = [t for t in templates if t.phase is phase and _usd(t, prices)]
        best: dict[str, float] = {}
        for template in mine:
            value = template.throughput_rps / _usd(template, prices)
            best[template.workload] = max(best.get(template.workload, 0.0), value)
        for pure, colour, shift in ((True, PURE, -0.12), (False, MIXED, 0.12)):
            shown = [t for t in mine if t.is_homogeneous is pure]
            axes.scatter(
                [t.nodes + shift for t in shown],
                [t.throughput_rps / _usd(t, prices) / best[t.workload] for t in shown],
                s=16,
                alpha=0.65,
                color=colour,
                linewidths=0,
                label="one node class" if pure else "mixed classes",
            )
        axes.set_title(phase.value, loc="left", fontsize=10)
        axes.set_ylim(0, 1.08)
        axes.set_xticks(sorted({t.nodes for t in templates}))
        axes.spines[["top", "right"]].set_visible(False)
    grid[-1, 0].set_xlabel("nodes per replica")
    figure.supylabel("requests per USD, best of workload = 1", fontsize=9)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=2, frameon=False)
    return figure


def _usd(template: Template, prices: dict[str, float]) -> float:
    if any(name not in prices for name, _ in template.combination):
        return 0.0
    return sum(prices[name] * count for name, count in template.combination)


def _numbers(inputs: Inputs, plan: Plan) -> list[_Number]:
    workloads = {workload.name: workload for workload in inputs.scenario.workloads}
    nodes = {node.name: node for node in inputs.scenario.node_classes}
    found = set()
    for planned in plan.replicas:
        workload = workloads[planned.template.workload]
        for stage in planned.template.placement.stages:
            for part in stage.nodes:
                node, tp = nodes[part.node_class], part.tensor_parallel_size
                terms = (workload.model, workload.dtype, node, tp)
                found.add(
                    (
                        workload.model.name,
                        node.name,
                        tp,
                        inputs.performance.provenance(*terms).value,
                        inputs.performance.source(*terms),
                    )
                )
    return [_Number(*item) for item in sorted(found)]


def _market_notes(inputs: Inputs) -> list[str]:
    """What is not well with the sources of prices, and places that are avoided."""
    notes = [f"{feed.note[0].upper()}{feed.note[1:]}." for feed in inputs.feeds if feed.note]
    avoided = inputs.scenario.avoided
    return [*notes, *([f"Avoided for now: {avoided}."] if avoided else [])]


def _assumptions(inputs: Inputs) -> list[str]:
    settings = inputs.scenario.placement
    return [
        f"Stock is {inputs.scenario.stock_note}: no public count of GPU stock exists.",
        describe_caps(inputs),
        describe_corrections(inputs),
        f"{settings.ttft_queue_share:.0%} of the TTFT objective is kept for queueing and "
        f"{settings.kv_handover_share:.0%} for moving the prompt's KV between prefill and decode.",
        f"{settings.memory_utilization:.0%} of a card's memory less "
        f"{settings.reserve_gib_per_gpu:g} GiB holds weights and KV.",
        f"A hop between stages takes {settings.hop_latency_ms:.3g} ms "
        f"({'measured' if settings.hop_measured else 'assumed'}) and its bytes; traffic inside a "
        "domain is free.",
        "Throughput is computed at mean lengths, latency with one request of p95 length.",
    ]


def describe_caps(inputs: Inputs) -> str:
    """Which utilisation caps a plan was made with."""
    assumed = inputs.scenario.placement.utilization
    shares = ", ".join(f"{phase.value} {cap:.0%}" for phase, cap in assumed.items())
    if not inputs.caps:
        return (
            f"Replicas are loaded to at most {shares} of their throughput: assumed caps, not "
            "calibrated by simulation (`coral calibrate-caps` does)."
        )
    found: dict[tuple[str, Phase], list[float]] = {}
    for (name, phase, template), cap in sorted(inputs.caps.items()):
        if template != ANY:
            found.setdefault((name, phase), []).append(cap)
    ranges = ", ".join(
        f"{name} {phase.value} " + " to ".join(dict.fromkeys((f"{min(of):.0%}", f"{max(of):.0%}")))
        for (name, phase), of in found.items()
    )
    return (
        f"Replicas are loaded to at most these shares of their throughput, calibrated by "
        f"simulation for each template: {ranges}; assumed for the others: {shares}."
    )


def describe_corrections(inputs: Inputs) -> str:
    """What serving changed of the figures that a plan was made with."""
    factors = sorted(inputs.corrections.values())
    if not factors:
        return "No template's throughput is corrected by what serving showed."
    spread = " to ".join(dict.fromkeys((f"{factors[0]:.0%}", f"{factors[-1]:.0%}")))
    return (
        f"Serving corrects the throughput of {len(factors)} templates, to {spread} of what their "
        "profiles say (`coral corrections` shows why)."
    )

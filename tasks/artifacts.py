"""What a run leaves in Prefect: the plan, its cost and limits, what changed and why, the market."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from catalog.store import Catalog
from planner.allocation.plan import Plan
from planner.replicas import Replica
from tasks.coral_task import publishing_task
from tasks.operating import Round
from tasks.report import Decision

TREND = 48  # plans shown
BAR = 24  # characters of the longest bar of the trend


def plan_table(decision: Decision) -> list[dict[str, object]]:
    """One row per template and domain of the plan."""
    return [
        {
            "domain": planned.domain,
            "phase": planned.template.phase.value,
            "workload": planned.template.workload,
            "placement": planned.template.placement.describe(),
            "replicas": planned.count,
            "requests/s": round(sum(planned.load_rps.values()), 3),
        }
        for planned in decision.coral.replicas
    ]


def binding_table(plan: Plan) -> list[dict[str, object]]:
    """What held the plan back, and what one more of it is worth."""
    return [
        {
            "limit": found.limit.text,
            "used": round(found.used, 3),
            "of": round(found.limit.amount, 3),
            "one more is worth": f"{found.worth:.2f} {found.worth_unit}",
        }
        for found in plan.binding
    ]


def cost_markdown(scenario: str, decision: Decision) -> str:
    """Cost beside Homo-joint's, served share and gap."""
    coral, homo = decision.coral, decision.homo_joint
    lines = [
        f"**{scenario}**: ${coral.cost_usd_per_hour:.2f}/h, {coral.served_share:.2%} served, "
        f"gap {coral.gap:.2%}.",
        f"Homo-joint: ${homo.cost_usd_per_hour:.2f}/h, {homo.served_share:.2%} served.",
    ]
    return "\n\n".join(lines)


def trend_markdown(catalog: Catalog, scenario: str) -> str:
    """The last plans of a scenario, the newest first, with a bar for the cost."""
    with catalog.read() as connection:
        rows = connection.execute(
            "SELECT created_at, cost_usd_per_hour, served_share, gap FROM allocation "
            "WHERE scenario = ? AND planner = 'coral' ORDER BY created_at DESC LIMIT ?",
            [scenario, TREND],
        ).fetchall()
    largest = max((cost for _, cost, _, _ in rows), default=0.0) or 1.0
    return "\n".join(
        [
            "| planned at | $/h | served | gap | |",
            "| --- | ---: | ---: | ---: | --- |",
            *(
                f"| {at:%Y-%m-%d %H:%M} | {cost:.2f} | {served:.1%} | {gap:.2%} "
                f"| {'█' * max(1, round(BAR * cost / largest))} |"
                for at, cost, served, gap in rows
            ),
        ]
    )


def changes_markdown(scenario: str, result: Round) -> str:
    """What a round of operation did and why."""
    applied, changes = result.applied, result.replicas
    lines = [
        f"**{scenario}**: {result.why}.",
        f"{applied.launched} nodes launched, {applied.failed} failed to launch, "
        f"{applied.held_back} held back, {applied.terminated} terminated; {result.nodes} held at "
        f"${result.cost_usd_per_hour:.2f}/h.",
        f"{len(changes.kept)} replicas kept, {len(changes.started)} started, "
        f"{len(changes.ended)} ended, {result.waiting} wait for those that follow them.",
        *(f"- {reason}" for reason in applied.why),
        *_replica_lines("started", changes.started, result),
        *_replica_lines("ended", changes.ended, result),
    ]
    return "\n\n".join(lines)


def market_gaps(catalog: Catalog) -> list[dict[str, object]]:
    """Parts of the market of which nothing is known now."""
    with catalog.read() as connection:
        rows = connection.execute(
            "SELECT feed, domain, part, gap_from, minutes, why FROM market_gap "
            "WHERE gap_to IS NULL ORDER BY minutes DESC"
        ).fetchall()
    return [
        {
            "source": feed,
            "domain": domain,
            "part": part,
            "not seen since": f"{since:%Y-%m-%d %H:%M}",
            "minutes": round(minutes),
            "why": why,
        }
        for feed, domain, part, since, minutes, why in rows
    ]


def publish_decision(catalog: Catalog, scenario: str, decision: Decision) -> None:
    """The artifacts of a plan."""
    key = artifact_key(scenario)
    create_table_artifact(plan_table(decision), key=f"{key}-plan", description="The plan")
    create_markdown_artifact(cost_markdown(scenario, decision), key=f"{key}-cost")
    create_table_artifact(
        binding_table(decision.coral), key=f"{key}-limits", description="What binds the plan"
    )
    create_markdown_artifact(trend_markdown(catalog, scenario), key=f"{key}-trend")
    create_link_artifact(
        decision.report.resolve().as_uri(), link_text="Report", key=f"{key}-report"
    )
    create_table_artifact(
        market_gaps(catalog), key="coral-market-gaps", description="Not known of the market now"
    )


def publish_round(catalog: Catalog, scenario: str, result: Round) -> None:
    """Those of a round of operation, and of its plan where it made one."""
    create_markdown_artifact(
        changes_markdown(scenario, result), key=f"{artifact_key(scenario)}-changes"
    )
    if result.decision is not None:
        publish_decision(catalog, scenario, result.decision)


def artifact_key(scenario: str) -> str:
    """Prefect takes small letters, digits and dashes."""
    return "coral-" + "".join(c if c.isalnum() else "-" for c in scenario.lower())


def _replica_lines(what: str, replicas: Sequence[Replica], result: Round) -> list[str]:
    placements = {}
    if result.decision is not None:
        placements = {
            planned.template.id: f"{planned.template.phase} {planned.template.workload} on "
            f"{planned.template.placement.describe()}"
            for planned in result.decision.coral.replicas
        }
    counted = Counter((r.domain, placements.get(r.template_id, r.template_id)) for r in replicas)
    return [
        f"- {what}: {count} x {placement} in {domain}"
        for (domain, placement), count in sorted(counted.items())
    ]


publish_decision_task = publishing_task("publish-plan", publish_decision)
publish_round_task = publishing_task("publish-round", publish_round)

"""What a run leaves in Prefect: the plan as a table, its cost, a link to the report."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from tasks.report import Decision


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


def cost_markdown(scenario: str, decision: Decision) -> str:
    """Cost beside Homo-joint's, served share, gap and what binds."""
    coral, homo = decision.coral, decision.homo_joint
    lines = [
        f"**{scenario}**: ${coral.cost_usd_per_hour:.2f}/h, {coral.served_share:.2%} served, "
        f"gap {coral.gap:.2%}.",
        f"Homo-joint: ${homo.cost_usd_per_hour:.2f}/h, {homo.served_share:.2%} served.",
        *(
            f"- {found.limit.text}: one more is worth {found.worth:.2f} {found.worth_unit}"
            for found in coral.binding
        ),
    ]
    return "\n\n".join(lines)


def publish_artifacts(scenario: str, decision: Decision, report: Path) -> None:
    """Create the three artifacts of a decision."""
    key = f"coral-{scenario}".lower().replace("_", "-")
    create_table_artifact(plan_table(decision), key=f"{key}-plan", description="The plan")
    create_markdown_artifact(cost_markdown(scenario, decision), key=f"{key}-cost")
    create_link_artifact(report.as_uri(), link_text="Report", key=f"{key}-report")


publish_task = task(name="publish-artifacts", cache_policy=NO_CACHE)(publish_artifacts)

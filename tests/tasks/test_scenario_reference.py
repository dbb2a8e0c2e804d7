"""The reference of a scenario's keys is that of the models."""

from __future__ import annotations

from pathlib import Path

import yaml

from planner.scenario import ScenarioSpec
from tasks.scenario_reference import markdown


def test_the_page_is_up_to_date(repository: Path) -> None:
    text = (repository / "docs" / "scenario.md").read_text()
    assert text == markdown(), "python -m tasks.scenario_reference > docs/scenario.md"


def test_it_has_every_key_that_shipped_scenarios_use(repository: Path) -> None:
    text = markdown()
    for file in (repository / "examples").glob("*.yaml"):
        values = yaml.safe_load(file.read_text())
        assert set(values) <= set(ScenarioSpec.model_fields)
        for group in ("placement", "allocation", "fleet", "stock", "market"):
            for key in values.get(group) or {}:
                assert f"| `{key}` |" in text, f"{group}.{key} of {file.name}"


def test_comments_and_limits_are_told() -> None:
    text = markdown()
    limits, said = "number, at least 0, at most 1", "of its demand, or no plan at all"
    assert f"| `least_served` | {limits} | `0` | {said} |" in text
    assert "## `workloads[].demand.observed`" in text
    assert "## `fleet.engines.NAME`" in text

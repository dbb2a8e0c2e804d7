"""The report and the artifacts of a decision."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from catalog.store import Catalog
from planner.allocation.explain import cost_by_workload
from tasks.allocation import decide
from tasks.artifacts import artifact_key, binding_table, cost_markdown, plan_table
from tasks.inputs import Inputs
from tasks.report import Decision


@pytest.fixture(scope="module")
def decision(core: tuple[Catalog, Inputs]) -> Decision:
    return decide(*core)


class Text(HTMLParser):
    """Visible text, open tags and what the page would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs) -> None:
        self.loads += [v for k, v in attrs if k in {"src", "href"} and not v.startswith("#")]
        if tag not in {"meta", "use", "path", "rect"}:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        if tag in self.open:
            self.open.reverse()
            self.open.remove(tag)
            self.open.reverse()

    def handle_data(self, data) -> None:
        self.words.append(data)


def test_the_page_holds_plan_costs_limits_sources_and_assumptions(decision: Decision) -> None:
    page = decision.report.read_text()
    text = Text(page)
    shown = " ".join(" ".join(text.words).split())
    assert f"${decision.coral.cost_usd_per_hour:.2f}/h" in shown
    assert f"${decision.homo_joint.cost_usd_per_hour:.2f}/h" in shown
    for planned in decision.coral.replicas:
        assert planned.template.placement.describe() in shown
    for found in decision.coral.binding:
        assert found.limit.text in shown
    assert {"measured", "calibrated"} <= set(shown.split())
    assert "Stock is assumed, level limited" in shown
    assert "42 rejected (spot not below on-demand)" in shown
    assert page.count("<svg") == 2


def test_the_page_loads_nothing_and_knows_light_and_dark(decision: Decision) -> None:
    page = decision.report.read_text()
    text = Text(page)
    assert text.loads == []
    assert text.open == []  # every tag is closed
    assert not re.search(r"url\((?!#)|@import", page)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert "#000000" not in page  # charts take the page's own ink


def test_costs_by_workload_add_up_to_the_rent(decision: Decision) -> None:
    for plan in (decision.coral, decision.homo_joint):
        assert sum(cost_by_workload(plan).values()) == pytest.approx(plan.cost_usd_per_hour)


def test_an_interrupted_report_leaves_no_half_page(
    core: tuple[Catalog, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = core[0].home / "reports"
    before = set(folder.glob("*.html"))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        decide(*core)
    assert set(folder.glob("*.html")) == before


def test_artifacts_say_what_the_plan_says(decision: Decision) -> None:
    rows = plan_table(decision)
    assert len(rows) == len(decision.coral.replicas)
    assert sum(int(str(row["replicas"])) for row in rows) == sum(
        planned.count for planned in decision.coral.replicas
    )
    text = cost_markdown("core", decision)
    assert f"${decision.coral.cost_usd_per_hour:.2f}/h" in text
    limits = binding_table(decision.coral)
    assert [row["limit"] for row in limits] == [b.limit.text for b in decision.coral.binding]
    assert artifact_key("My_Scenario 2") == "coral-my-scenario-2"


def test_templates_of_every_phase_are_in_the_chart(
    core: tuple[Catalog, Inputs], decision: Decision
) -> None:
    page = decision.report.read_text()
    for phase in ("prefill", "decode", "aggregated"):
        assert f">{phase}<" in page

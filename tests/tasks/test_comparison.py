"""What is compared: engines, levers, starts, ratios and plots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.allocation.options import ServiceRules
from planner.allocation.problem import AllocationInput
from planner.engine import Engine
from planner.types import Market, Phase
from tasks.comparison import Case, plan_cases
from tasks.comparison_plot import draw_lines
from tasks.comparison_view import CORAL, Line, ratios
from tasks.levers import levers
from tests.builders import EXACT, offer, template, workload

AGG = Phase.AGGREGATED
WHOLE = (template("wide", AGG, {"A x1": 1}, 1.0),)


def market() -> AllocationInput:
    """One workload that a mixed replica serves best, two domains, spot and on-demand."""
    templates = [
        template("a", AGG, {"A x1": 1}, 1.0),
        template("b", AGG, {"B x1": 1}, 1.0),
        template("ab", AGG, {"A x1": 1, "B x1": 1}, 4.0),
        replace(template("other", AGG, {"B x1": 2}, 2.5, "code"), shared_rps={"chat": 2.5}),
    ]
    offers = [
        offer(domain, node, 1.0, 4, market)
        for domain in ("d1", "d2")
        for node in ("A x1", "B x1")
        for market in (Market.ON_DEMAND, Market.SPOT)
    ]
    workloads = [workload("chat", 8.0), workload("code", 1.0)]
    return AllocationInput.of(workloads, templates, offers, settings=EXACT)


def cases(data: AllocationInput) -> list[Case]:
    """Stock vLLM has no templates but those of one node."""
    single = replace(data, templates=tuple(t for t in data.templates if t.nodes == 1))
    return [
        Case("m", "m", Engine.VLLM, single, WHOLE),
        Case("m", "m", Engine.ANY, data, WHOLE),
    ]


@pytest.mark.parametrize("ablate", [False, True])
def test_coral_is_never_worse_than_what_it_could_have_planned(ablate: bool) -> None:
    lines = plan_cases(cases(market()), ablate=ablate)
    assert [line.engine for line in lines] == sorted(line.engine for line in lines)
    coral = {line.engine: line for line in lines if line.planner == CORAL}
    assert coral[Engine.ANY].served_all
    assert coral[Engine.ANY].served_share > coral[Engine.VLLM].served_share
    for line in lines:
        assert line.served_share <= coral[line.engine].served_share + 1e-6
    for ratio in ratios(lines):
        assert (ratio.cost_median or 1.0) >= 1.0 - 1e-6
        assert (ratio.goodput_median or 1.0) >= 1.0 - 1e-6


def test_levers_are_those_of_the_input_and_promise_nothing() -> None:
    data = replace(market(), rules={"chat": ServiceRules(least_served=1.0)})
    found = dict(levers(data, WHOLE))
    assert {"no node options", "no shared replicas", "no spot", "one domain"} <= found.keys()
    assert len(found) == 9
    for name, planner in found.items():
        assert planner(data) is not None, name
    plain = replace(
        data,
        templates=data.templates[:1],
        offers=tuple(o for o in data.offers if o.domain == "d1" and o.market is not Market.SPOT),
    )
    assert "no spot" not in dict(levers(plain, None))
    assert len(dict(levers(plain, None))) == 5


@pytest.mark.parametrize("groups", [("core",), ("0.5", "1"), ("tight", "scarce")])
def test_every_kind_of_comparison_has_its_plot(tmp_path: Path, groups: tuple[str, ...]) -> None:
    lines = [
        Line(engine, f"case {group}", group, name, cost, share, 10.0, 3, None, 0.1)
        for engine in Engine
        for group in groups
        for name, cost, share in ((CORAL, 1.0, 1.0), ("homo", 2.0, 1.0), ("single", 0.0, 0.0))
    ]
    draw_lines(lines, "comparison over a test", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

"""Caps by simulation: brackets, busy shares, and plans that then attain their objectives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from catalog.store import Catalog
from coral.render_calibration import calibration_summary, print_calibration
from planner.types import Phase
from tasks.allocation import decide, read_library
from tasks.calibration import BRACKET, Calibration, _Brackets, busy_shares, calibrate_caps
from tasks.inputs import Inputs, load_inputs
from tasks.library import build_phase
from tasks.report import describe_caps
from tasks.requests import Load
from tasks.scenario_file import read_scenario
from tasks.simulation import simulate_plan
from tasks.solving import Solvers

AGG = ("chat", Phase.AGGREGATED)
PRE = ("chat", Phase.PREFILL)


def test_bisection_narrows_every_bracket() -> None:
    true = {AGG: 0.83, PRE: 1.21}
    brackets = _Brackets(0.95, 1.3)
    at: float | None = 1.0
    tried = 0
    while at is not None:
        brackets.add(at, {key: float(at <= limit) for key, limit in true.items()})
        at, tried = brackets.next_load(), tried + 1
    for key, limit in true.items():
        low, high = brackets.of(key)
        assert low <= limit < high <= low * (1 + BRACKET)
    assert tried < 16


def test_what_never_fails_is_borne_to_the_top() -> None:
    brackets = _Brackets(0.95, 1.3)
    at: float | None = 1.0
    while at is not None:
        brackets.add(at, {AGG: 1.0})
        at = brackets.next_load()
    assert brackets.of(AGG)[0] > 1.3 / (1 + BRACKET)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Catalog, Inputs]:
    catalog = Catalog(tmp_path_factory.mktemp("tiny"))
    inputs = load_inputs(catalog, read_scenario("tiny"))
    with Solvers(workers=0) as solvers:
        for phase in inputs.phases:
            build_phase(catalog, phase, solvers)
    return catalog, inputs


@pytest.fixture(scope="module")
def calibrated(tiny: tuple[Catalog, Inputs]) -> Calibration:
    return calibrate_caps(*tiny, Load(minutes=3.0), most_rounds=3)


def test_calibrated_plans_attain_what_was_asked(tiny, calibrated: Calibration) -> None:
    assert calibrated.attained
    assert all(0.1 < cap <= 1.0 for cap in calibrated.chosen.caps.values())
    catalog, _ = tiny
    again = load_inputs(catalog, read_scenario("tiny"))
    assert again.caps == calibrated.chosen.caps
    decision = decide(catalog, again)
    assert "calibrated by simulation" in describe_caps(again)
    assert "calibrated by simulation" in decision.report.read_text()
    busy = busy_shares(decision.coral, again.caps, again.scenario.placement.utilization)
    assert all(share <= again.caps.get(key, 1.0) + 1e-6 for key, share in busy.items())
    found = simulate_plan(catalog, again, Load(minutes=3.0))
    assert found.attainment >= 0.95
    assert calibration_summary(calibrated)["attained"] is True


def test_caps_are_for_the_terms_they_were_found_for(tiny, calibrated: Calibration, capsys) -> None:
    catalog, _ = tiny
    spec = read_scenario("tiny")
    assumed = spec.placement.model_copy(update={"caps": "assumed"})
    assert load_inputs(catalog, spec.model_copy(update={"placement": assumed})).caps == {}
    (workload,) = spec.workloads
    slower = workload.model_copy(update={"slo": workload.slo.model_copy(update={"tpot_ms": 90})})
    changed = load_inputs(catalog, spec.model_copy(update={"workloads": (slower,)}))
    assert changed.caps == {}
    assert "assumed caps" in describe_caps(changed)
    print_calibration(calibrated)
    assert "Plan 1: $" in capsys.readouterr().out


def test_caps_scale_what_the_library_says(tiny, calibrated: Calibration) -> None:
    catalog, inputs = tiny
    plain = {t.id: t for t in read_library(catalog, replace(inputs, caps={}))}
    key, cap = next(iter(calibrated.chosen.caps.items()))
    scaled = read_library(catalog, replace(inputs, caps={key: cap}))
    for template in scaled:
        before = plain[template.id].throughput_rps
        factor = cap / calibrated.assumed[key[1]] if template.phase is key[1] else 1.0
        assert template.throughput_rps == pytest.approx(before * factor)


def test_an_incomplete_library_is_said(tmp_path: Path) -> None:
    from planner.errors import NoTemplateError

    catalog = Catalog(tmp_path)
    inputs = load_inputs(catalog, read_scenario("tiny"))
    with pytest.raises(NoTemplateError, match="coral library build"):
        calibrate_caps(catalog, inputs, Load())

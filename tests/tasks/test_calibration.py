"""Caps by simulation: brackets, busy shares, and plans that then attain their objectives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from catalog.store import Catalog
from coral.render_calibration import calibration_summary, print_calibration
from planner.caps import ANY
from planner.errors import ImpossibleSloError
from planner.types import Phase, Template
from tasks.allocation import decide, read_library
from tasks.calibration import STEP, Calibration, Round, calibrate_caps
from tasks.inputs import Inputs, load_inputs
from tasks.library import build_phase
from tasks.report import describe_caps
from tasks.requests import Load
from tasks.scenario_file import read_scenario
from tasks.simulation import simulate_plan
from tasks.solving import Solvers
from tasks.template_caps import WIDTH, Bench, attains, template_cap


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
    return calibrate_caps(*tiny, Load(minutes=3.0), most_rounds=12)


def test_calibrated_plans_attain_what_was_asked(tiny, calibrated: Calibration) -> None:
    assert calibrated.attained
    assert all(0.1 < cap <= 1.0 for cap in calibrated.chosen.caps.values())
    catalog, _ = tiny
    again = load_inputs(catalog, read_scenario("tiny"))
    assert again.caps == calibrated.chosen.caps
    decision = decide(catalog, again)
    assert "calibrated by simulation" in describe_caps(again)
    assert "calibrated by simulation" in decision.report.read_text()
    used = {(name, r.template.phase, r.template.id)
            for r in decision.coral.replicas for name in r.load_rps}  # fmt: skip
    assert used <= again.caps.keys()
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


def test_a_cap_is_the_most_that_a_replica_bears_alone(tiny) -> None:
    catalog, inputs = tiny
    library = read_library(catalog, replace(inputs, caps={}))
    bench = Bench(inputs, library, {}, Load(), 0.95)
    for phase in (Phase.AGGREGATED, Phase.DECODE):
        template = max((t for t in library if t.phase is phase), key=lambda t: t.throughput_rps)
        cap = template_cap(bench, template, "Qwen3-14B")
        assert 0.1 < cap < 1.0
        assert attains(bench, template, "Qwen3-14B", cap)
        assert not attains(bench, template, "Qwen3-14B", cap * WIDTH**2)


def test_an_objective_that_no_load_meets_has_no_cap(tiny) -> None:
    catalog, inputs = tiny
    library = read_library(catalog, replace(inputs, caps={}))
    (workload,) = inputs.scenario.workloads
    hurried = replace(workload, slo=replace(workload.slo, tpot_ms=1.0))
    scenario = replace(inputs.scenario, workloads=(hurried,))
    bench = Bench(replace(inputs, scenario=scenario), library, {}, Load(), 0.95)
    template = next(t for t in library if t.phase is Phase.AGGREGATED)
    assert template_cap(bench, template, workload.name) == 0.0


def test_a_template_that_is_never_in_time_leaves_its_phase_to_others(tiny, monkeypatch) -> None:
    first: dict[Phase, str] = {}

    def cap(_: Bench, template: Template, __: str) -> float:
        return 0.0 if template.id == first.setdefault(template.phase, template.id) else 0.5

    monkeypatch.setattr("tasks.calibration.template_cap", cap)
    monkeypatch.setattr("tasks.calibration._record", lambda *_: None)
    found = calibrate_caps(*tiny, Load(minutes=0.2), most_rounds=6)
    used = {key[2] for key, cap in found.rounds[-1].caps.items() if cap > 0.0} - {ANY}
    assert used
    assert not used & set(first.values())


def test_a_workload_that_no_template_serves_in_time_is_named(tiny, monkeypatch) -> None:
    monkeypatch.setattr("tasks.calibration.template_cap", lambda *_: 0.0)
    with pytest.raises(ImpossibleSloError, match="Qwen3-14B are not in time on any template"):
        calibrate_caps(*tiny, Load(minutes=0.1), most_rounds=500)


def test_caps_move_with_what_a_plan_attains() -> None:
    def found(share: float, requests: int) -> Round:
        return Round({}, 1.0, 1.0, {"chat": share}, {"chat": requests}, 0)

    assert found(0.94, 100).moves(0.95) == {}  # within two standard errors
    assert found(0.94, 100).attains(0.95)
    assert found(0.93, 100_000).moves(0.95) == {"chat": STEP}
    assert not found(0.93, 100_000).attains(0.95)
    assert found(0.96, 100).moves(0.95) == {}
    assert found(0.99, 100).moves(0.95) == {"chat": 1.0 / STEP}


def test_caps_scale_what_the_library_says(tiny, calibrated: Calibration) -> None:
    catalog, inputs = tiny
    plain = {t.id: t for t in read_library(catalog, replace(inputs, caps={}))}
    key, cap = next((k, cap) for k, cap in calibrated.chosen.caps.items() if k[2] != ANY)
    scaled = read_library(catalog, replace(inputs, caps={key: cap}))
    for template in scaled:
        before = plain[template.id].throughput_rps
        factor = cap / calibrated.assumed[key[1]] if template.id == key[2] else 1.0
        assert template.throughput_rps == pytest.approx(before * factor)


def test_an_incomplete_library_is_said(tmp_path: Path) -> None:
    from planner.errors import NoTemplateError

    catalog = Catalog(tmp_path)
    inputs = load_inputs(catalog, read_scenario("tiny"))
    with pytest.raises(NoTemplateError, match="coral library build"):
        calibrate_caps(catalog, inputs, Load())

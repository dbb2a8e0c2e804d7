"""From minutes that were seen to the speed of a template and the factor on its throughput."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.corrections import (
    LEAST_MINUTES,
    Minutes,
    factor_of,
    settled,
    speed_of,
    with_corrections,
)
from planner.expected import Bench
from planner.known import Known
from planner.perf.model import PerformanceModel
from planner.placement.evaluate import evaluate, make_template
from planner.placement.loads import at_load
from planner.placement.profile import PhaseProblem, build_phase_problem
from planner.resolve import Scenario, resolve_scenario
from planner.types import (
    Lengths,
    Phase,
    Placement,
    Stage,
    StageNode,
    Template,
    Workload,
    combination_of,
)
from tasks.scenario_file import read_scenario

EVEN = Lengths("even", 1000.0, 200.0, 1000.0, 200.0)  # no long ones: plan and load are alike


@pytest.fixture(scope="module")
def scenario(known: Known) -> Scenario:
    return resolve_scenario(read_scenario("tiny"), known)


@pytest.fixture(scope="module")
def bench(scenario: Scenario, performance: PerformanceModel) -> Bench:
    nodes = {node.name: node for node in scenario.node_classes}
    return Bench(performance, nodes, scenario.placement)


@pytest.fixture(scope="module")
def even(scenario: Scenario) -> Workload:
    return replace(scenario.workloads[0], lengths=EVEN)


def problem_of(bench: Bench, workload: Workload, phase: Phase) -> PhaseProblem:
    nodes = list(bench.nodes.values())
    return build_phase_problem(workload, phase, nodes, bench.performance, bench.settings)


def template_of(
    bench: Bench, workload: Workload, phase: Phase, batch: int, micro_batches: int = 1
) -> Template:
    """Two L40S in a row; one for prefill."""
    layers = workload.model.layers
    half, node = layers // 2, StageNode("L40S x1", 1, 1, batch)
    stages = (Stage(0, half, (node,)), Stage(half, layers - half, (node,)))
    if phase is Phase.PREFILL:
        stages = (Stage(0, layers, (node,)),)
    combination = combination_of({"L40S x1": len(stages)})
    problem = problem_of(bench, workload, phase)
    times = at_load(problem, combination, Placement(stages, 1, batch, 1, 1, 1), np.ones(1))
    cycle = float(times.cycle_ms(micro_batches)[0])
    rps = micro_batches * batch * 1e3 / (workload.lengths.mean_output * cycle)
    latency = cycle
    if phase is Phase.PREFILL:
        cycle, latency = float(times.slowest_ms[0]), float(times.latency_ms[0])
        rps = batch * 1e3 / cycle
    placement = Placement(stages, micro_batches, batch, cycle, latency, rps)
    return make_template(problem, combination, placement)


def minutes(count: int, among: float, tpot_ms: float, **changes: object) -> Minutes:
    ones = np.ones(count)
    found = Minutes(
        in_flight=among * ones, decoding=among * ones, among=among * ones, tpot_ms=tpot_ms * ones,
        timed_tokens=1000 * ones, requests_per_s=0 * ones, tokens_per_s=0 * ones,
        prompt_tokens=EVEN.mean_input, output_tokens=EVEN.mean_output,
    )  # fmt: skip
    return replace(found, **changes)


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.AGGREGATED])
def test_a_full_replica_is_expected_to_do_what_the_plan_says(
    bench: Bench, even: Workload, phase: Phase
) -> None:
    template = template_of(bench, even, phase, 8, micro_batches=2)
    planned = evaluate(problem_of(bench, even, phase), template.combination, template.placement)
    rate = 16 * 1e3 / planned.cycle_ms
    seen = minutes(12, 16.0, planned.cycle_ms, tokens_per_s=np.full(12, 0.7 * rate))
    found = speed_of(bench, template, even, seen)
    assert found is not None and found.kind == "throughput"
    assert found.speed == pytest.approx(0.7)
    assert found.predicted == pytest.approx(rate) and found.has_drifted
    # By its tokens' times, of an aggregated replica a little less: none waits for its own prompt.
    timed = speed_of(bench, template, even, minutes(12, 14.0, planned.cycle_ms / 0.8))
    assert timed is not None and timed.kind == "tpot"
    assert 0.7 < timed.speed <= 0.8


def test_a_full_prefill_replica_is_judged_by_its_prompts(bench: Bench, even: Workload) -> None:
    template = template_of(bench, even, Phase.PREFILL, 2)
    full = template.placement.raw_rps
    seen = minutes(12, 2.0, np.nan, requests_per_s=np.full(12, 1.1 * full))
    found = speed_of(bench, template, even, seen)
    assert found is not None and (found.speed, found.kind) == (pytest.approx(1.1), "throughput")
    assert not found.has_drifted
    assert speed_of(bench, template, even, minutes(12, 1.0, np.nan)) is None


def test_few_minutes_little_load_and_few_tokens_teach_nothing(bench: Bench, even: Workload) -> None:
    template = template_of(bench, even, Phase.DECODE, 16)
    assert speed_of(bench, template, even, minutes(LEAST_MINUTES, 8.0, 30.0)) is not None
    assert speed_of(bench, template, even, minutes(LEAST_MINUTES - 1, 8.0, 30.0)) is None
    assert speed_of(bench, template, even, minutes(60, 3.0, 30.0)) is None
    few = minutes(60, 8.0, 30.0, timed_tokens=np.full(60, 5.0))
    assert speed_of(bench, template, even, few) is None


def test_one_bad_minute_moves_nothing(bench: Bench, even: Workload) -> None:
    template = template_of(bench, even, Phase.DECODE, 16)
    calm = minutes(11, 8.0, 30.0)
    shaken = replace(calm, tpot_ms=np.append(np.full(10, 30.0), 3000.0))
    expected, found = (speed_of(bench, template, even, seen) for seen in (calm, shaken))
    assert expected is not None and found is not None and found.speed == expected.speed


def test_lengths_that_were_seen_count_and_not_those_planned(bench: Bench, even: Workload) -> None:
    """Longer contexts take longer, and are no fault of the profile."""
    template = template_of(bench, even, Phase.DECODE, 16)
    longer = replace(even, lengths=Lengths("long", 4000.0, 200.0, 4000.0, 200.0))
    slow = at_load(
        problem_of(bench, longer, Phase.DECODE), template.combination, template.placement,
        np.array([0.75]),
    ).cycle_ms(1)  # fmt: skip
    seen = minutes(12, 12.0, float(slow[0]), prompt_tokens=4000.0)
    found = speed_of(bench, template, even, seen)
    assert found is not None and found.speed == pytest.approx(1.0, abs=1e-6)


def test_the_row_behind_a_speed_is_the_nearest_one(bench: Bench, even: Workload) -> None:
    template = template_of(bench, even, Phase.DECODE, 16)
    found = speed_of(bench, template, even, minutes(12, 12.0, 30.0))
    assert found is not None
    rows = bench.performance.rows[
        even.model.name, even.dtype, bench.nodes["L40S x1"].gpu.profile_name, 1
    ]
    decode = [row for row in rows if row.phase == "decode"]
    near = min(
        decode,
        key=lambda r: abs(np.log(r.batch / 12.0)) + abs(np.log(max(1, r.context) / 1100.0)),
    )
    assert f"decode, batch {near.batch}, {near.tokens} tokens, context {near.context}" in found.row
    assert found.row.startswith(f"layer_profile: {even.model.name} {even.dtype} on L40S")


def test_slower_steps_leave_room_for_fewer_requests(bench: Bench, even: Workload) -> None:
    template = template_of(bench, even, Phase.DECODE, 16)
    problem = problem_of(bench, even, Phase.DECODE)
    assert factor_of(template, problem, 1.0) == 1.0
    assert factor_of(template, problem, 1.2) == pytest.approx(1.2)
    assert factor_of(template, problem, 2.0) == 1.3
    assert factor_of(template, problem, 0.2) == 0.7
    cycle = template.placement.cycle_ms
    loose = replace(problem, terms=replace(problem.terms, budget_ms=2.0 * cycle))
    assert factor_of(template, loose, 0.8) == pytest.approx(0.8)  # steps may take that long
    tight = replace(problem, terms=replace(problem.terms, budget_ms=cycle))
    fewer = factor_of(template, tight, 0.95)
    assert 0.7 <= fewer < 0.95
    share = np.arange(1, 65) / 64
    cycles = at_load(problem, template.combination, template.placement, share).cycle_ms(1)
    best = max(r * 0.95 / c for r, c in zip(share, cycles, strict=True) if c <= 0.95 * cycle)
    assert fewer == pytest.approx(max(0.7, best * cycle))


def test_a_factor_stays_where_it_hardly_moves() -> None:
    assert settled(0.96, 1.0) == 1.0
    assert settled(0.90, 1.0) == 0.90
    assert settled(0.94, 0.90) == 0.90
    assert settled(0.85, 0.90) == 0.85
    assert settled(0.97, 0.90) == 1.0


def test_corrections_reach_guests_too(bench: Bench, even: Workload) -> None:
    one = replace(template_of(bench, even, Phase.DECODE, 16), shared_rps={"guest": 2.0})
    other = replace(one, id="other")
    corrected, same = with_corrections([one, other], {one.id: 0.8, "gone": 0.7})
    assert corrected.throughput_rps == pytest.approx(0.8 * one.throughput_rps)
    assert corrected.shared_rps == {"guest": pytest.approx(1.6)}
    assert same == other

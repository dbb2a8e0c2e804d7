"""Simulated capacity against what the planner promises for the same placement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.known import Known
from planner.perf.model import PerformanceModel
from planner.placement.evaluate import evaluate
from planner.placement.profile import build_phase_problem
from planner.placement.settings import PlacementSettings
from planner.types import Lengths, Phase, Placement, Slo, Stage, StageNode, Workload, combination_of
from simulator.fleet import Engine, Site, replica_engines
from simulator.run import Status, simulate
from simulator.tables import GroupKind, TableSizes, build_tables
from simulator.trace import Trace

# Equal lengths: then the planner's batch with one p95 request in it is the batch there is.
LENGTHS = Lengths("equal", mean_input=600, mean_output=300, p95_input=600, p95_output=300)
SETTINGS = PlacementSettings()


def rates(
    known: Known,
    performance: PerformanceModel,
    phase: Phase,
    stages: tuple[Stage, ...],
    micro_batches: int,
) -> tuple[float, float]:
    """Planned and simulated requests/s of one replica that is always full."""
    model = known.models["Qwen/Qwen3-14B"]
    workload = Workload("chat", model, model.dtype, Slo(60_000.0, 1_000.0), LENGTHS, 1.0)
    classes = {item.node.name: item.node for item in known.instance_types}
    names = [node.node_class for stage in stages for node in stage.nodes]
    nodes = [classes[name] for name in sorted(set(names))]
    problem = build_phase_problem(workload, phase, nodes, performance, SETTINGS)
    combination = combination_of({name: names.count(name) for name in names})
    batch = sum(node.batch for node in stages[0].nodes)
    guess = Placement(stages, micro_batches, batch, 1.0, 1.0, 1.0)
    planned = evaluate(problem, combination, guess)
    site = Site(performance, {node.name: node for node in nodes}, SETTINGS)
    engines = replica_engines("r", phase, guess, workload, "here", {"chat": 1.0}, site)
    if phase is Phase.DECODE:  # prompts come computed from prefill engines that take no time
        engines += prompts_at_once(engines)
    total = 40 * batch * micro_batches
    whole = np.ones(total, dtype=np.int64)
    trace = Trace(("chat",), np.zeros(total), whole * 0, whole * 600, whole * 300)
    result = simulate(engines, trace, performance)
    assert (result.status == Status.DONE).all()
    assert result.preemptions.sum() == 0
    # Without the ramps: between a tenth and nine tenths of the ends.
    ends = np.sort(result.finish_ms)
    first, last = total // 10, 9 * total // 10
    return planned.raw_rps, (last - first) * 1e3 / (ends[last] - ends[first])


def prompts_at_once(engines: list[Engine]) -> list[Engine]:
    """Prefill engines enough never to be what limits."""
    source = engines[0]
    return [
        replace(
            source,
            name=f"prompts{k}",
            phase=Phase.PREFILL,
            stages=(source.stages[0],),
            micro_batches=1,
            token_budget=8192,
            kv_ms_per_token=0.0,
        )
        for k in range(24)
    ]


def one_stage(model_layers: int, node: StageNode) -> tuple[Stage, ...]:
    return (Stage(0, model_layers, (node,)),)


@pytest.mark.parametrize(
    ("stages", "micro_batches"),
    [
        (one_stage(40, StageNode("H100 x1", 1, 1, 48)), 1),
        (
            (
                Stage(0, 20, (StageNode("L40S x1", 1, 1, 24),)),
                Stage(20, 20, (StageNode("L40S x1", 1, 1, 24),)),
            ),
            2,
        ),
    ],
)
def test_decode_reaches_the_planned_rate(known, performance, stages, micro_batches) -> None:
    planned, simulated = rates(known, performance, Phase.DECODE, stages, micro_batches)
    assert simulated == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize(
    ("stages", "micro_batches"),
    [
        (one_stage(40, StageNode("H100 x1", 1, 1, 64)), 1),
        (one_stage(40, StageNode("L40S x4", 2, 2, 96)), 1),
    ],
)
def test_aggregated_reaches_the_planned_rate(known, performance, stages, micro_batches) -> None:
    """Up to 7% less (docs/formulation.md, section 10): prompts hold places among the decodes, and
    steps are not all of the mean size, which costs where step times bend."""
    planned, simulated = rates(known, performance, Phase.AGGREGATED, stages, micro_batches)
    assert 0.92 * planned <= simulated <= 1.01 * planned


def test_prefill_reaches_the_planned_rate(known, performance) -> None:
    """A replica whose prompts go to decode engines that are never full."""
    model = known.models["Qwen/Qwen3-14B"]
    workload = Workload("chat", model, model.dtype, Slo(60_000.0, 1_000.0), LENGTHS, 1.0)
    node = next(item.node for item in known.instance_types if item.node.name == "H100 x1")
    problem = build_phase_problem(workload, Phase.PREFILL, [node], performance, SETTINGS)
    placement = Placement(one_stage(40, StageNode(node.name, 1, 1, 4)), 1, 4, 1.0, 1.0, 1.0)
    planned = evaluate(problem, ((node.name, 1),), placement).raw_rps
    site = Site(performance, {node.name: node}, SETTINGS)
    (source,) = replica_engines(
        "p", Phase.PREFILL, placement, workload, "here", {"chat": 1.0}, site
    )
    wide = Placement(one_stage(40, StageNode(node.name, 1, 1, 64)), 1, 64, 1.0, 1.0, 1.0)
    sinks = [
        engine
        for k in range(8)
        for engine in replica_engines(
            f"d{k}", Phase.DECODE, wide, workload, "here", {"chat": 1.0}, site
        )
    ]
    count = 4 * 200
    whole = np.ones(count, dtype=np.int64)
    trace = Trace(("chat",), np.zeros(count), whole * 0, whole * 600, whole * 2)
    result = simulate([source, *sinks], trace, performance)
    assert (result.status == Status.DONE).all()
    firsts = np.sort(result.start_ms)
    simulated = (count - 4) * 1e3 / (firsts[-1] - firsts[0])
    assert simulated == pytest.approx(planned, rel=0.02)


def test_tables_answer_as_the_performance_model(known, performance) -> None:
    """A mixed step of 64 decodes and one whole prompt, and a decode step, per layer."""
    model = known.models["Qwen/Qwen3-14B"]
    node = next(item.node for item in known.instance_types if item.node.name == "L40S x4")
    kind = GroupKind(model, model.dtype, node, 2)
    tables = build_tables(performance, [kind], TableSizes(100, 1024, 4096))
    batch, context, prompt = np.array([64.0]), np.array([700.0]), 600
    low = int(context[0] // tables.context_step)
    part = context[0] / tables.context_step - low
    around = slice(low, low + 2)
    weights = np.array([1.0 - part, part])
    mixed = tables.mixed_ms[0, 64 + prompt] + tables.prompt_ms[0, prompt]
    mixed += weights @ tables.attention_ms[0, 64, around]
    asked = (model, model.dtype, node, 2, batch, context)
    expected = performance.mixed_step(*asked, np.array([float(prompt)]), prompt)
    assert mixed == pytest.approx(expected.layer_ms[0], rel=1e-3)
    decode = weights @ tables.decode_ms[0, 64, around]
    assert decode == pytest.approx(performance.decode_step(*asked).layer_ms[0], rel=1e-3)

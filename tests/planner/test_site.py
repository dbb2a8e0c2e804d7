"""A local site in a scenario: what it adds to what is known, and what it must not say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from planner.engine import EngineLimits, engine_limits
from planner.errors import ScenarioError, UnknownNameError
from planner.figures import service_figures
from planner.hop import Hop
from planner.known import Known
from planner.perf.model import PerformanceModel
from planner.perf.tables import LayerRow
from planner.placement.profile import build_phase_problem
from planner.resolve import resolve_scenario
from planner.scenario import FleetSpec, ScenarioSpec
from planner.shapes import ModelConfigError, model_from_config
from planner.types import (
    GpuSpec,
    Lengths,
    Phase,
    Placement,
    Provenance,
    Stage,
    StageNode,
    Template,
)
from tasks.scenario_file import read_scenario

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 512,
    "num_hidden_layers": 8,
}  # fmt: skip


def local(**changes: object) -> ScenarioSpec:
    return read_scenario("local").model_copy(update=changes)


def measured(known: Known) -> Known:
    """What is known after a measurement of this machine."""
    cpu = GpuSpec("CPU", "CPU", 24.0, 10.0, 0.1, 0.0, 0.0)
    model = model_from_config("coral/tiny", CONFIG, "float32")
    return replace(
        known, gpus={**known.gpus, "CPU": cpu}, models={**known.models, model.name: model}
    )


def test_nodes_of_this_machine_are_offers_with_their_memory_and_stock(known: Known) -> None:
    scenario = resolve_scenario(local(), measured(known))
    a, b = scenario.node_classes
    assert (a.name, a.gpu.profile_name, a.gpu.memory_gib) == ("CPU-a x1", "CPU", 0.070)
    assert (b.name, b.gpu.memory_gib) == ("CPU-b x1", 0.045)
    found = {(o.instance_type, o.price_usd_per_hour, o.stock) for o in scenario.offers}
    assert found == {("cpu-a", 0.02, 1), ("cpu-b", 0.01, 1)}
    assert "as the scenario says" in scenario.offers[0].stock_source


def test_a_measured_hop_is_planned_with_unless_the_scenario_says_another(known: Known) -> None:
    hops = {"CPU": Hop(0.3, 2e-6), "L4-24GB": Hop(9.0, 9.0)}
    here = replace(measured(known), hops=hops)
    found = resolve_scenario(local(), here).placement
    assert (found.hop_latency_ms, found.hop_ms_per_byte, found.hop_measured) == (0.3, 2e-6, True)
    spec = local()
    said = spec.placement.model_copy(update={"hop_latency_ms": 0.5})
    kept = resolve_scenario(spec.model_copy(update={"placement": said}), here).placement
    assert (kept.hop_latency_ms, kept.hop_ms_per_byte, kept.hop_measured) == (0.5, 0.0, False)
    assumed = resolve_scenario(local(), replace(here, hops={"other": hops["CPU"]})).placement
    assert (assumed.hop_latency_ms, assumed.hop_measured) == (0.2, False)


def test_without_a_measurement_the_way_out_is_named(known: Known) -> None:
    with pytest.raises(UnknownNameError, match=r"'CPU' .*coral serve-local"):
        resolve_scenario(local(), known)


def test_a_model_without_an_engine_and_requests_too_long_are_refused(known: Known) -> None:
    spec = local()
    other = spec.fleet.model_copy(
        update={"engines": {"org/other": spec.fleet.engines["coral/tiny"]}}
    )
    with pytest.raises(ScenarioError, match="does not say how 'coral/tiny' is started"):
        resolve_scenario(spec.model_copy(update={"fleet": other}), measured(known))
    engine = spec.fleet.engines["coral/tiny"].model_copy(update={"max_model_len": 100})
    short = spec.fleet.model_copy(update={"engines": {"coral/tiny": engine}})
    with pytest.raises(ScenarioError, match=r"up to 144 tokens .*max_model_len"):
        resolve_scenario(spec.model_copy(update={"fleet": short}), measured(known))


def with_table(performance: PerformanceModel) -> PerformanceModel:
    """A measured table of one core group."""
    rows = [
        *(LayerRow("decode", b, b, c, 1.0, 0.1, 0.1, "made up") for b in (1, 8) for c in (32, 512)),
        *(LayerRow("prefill", 1, n, 0, 1.0, 0.1, 0.1, "made up") for n in (16, 512)),
    ]
    return replace(performance, rows={("coral/tiny", "float32", "CPU", 1): rows})


NODE = {
    "instance_type": "a", "gpu": "A", "memory_gib": 1, "price_usd_per_hour": 1, "cores": [["0"]]
}  # fmt: skip
UNEVEN = {**NODE, "cores": [["0"], ["1", "2"]]}
ENGINES = {"m": {"path": "m", "max_model_len": 64}}


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        ({"kind": "local"}, "says its nodes and engines"),
        ({"nodes": [NODE]}, "go with kind: local"),
        ({"kind": "local", "nodes": [NODE, NODE], "engines": ENGINES}, "has one entry"),
        (
            {
                "kind": "local",
                "nodes": [{**NODE, "cores": [["0"], ["1", "2"]]}],
                "engines": ENGINES,
            },
            "equal numbers of groups",
        ),
        (
            {
                "kind": "local",
                "nodes": [NODE, {**NODE, "instance_type": "b", "memory_gib": 2}],
                "engines": ENGINES,
            },
            "two sizes of memory",
        ),
        ({"kind": "local", "domain": "aws:x", "nodes": [NODE], "engines": ENGINES}, "'local:'"),
    ],
)
def test_a_site_that_contradicts_itself_is_refused(fleet: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FleetSpec.model_validate(fleet)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"engine": "any"}, "engine: vllm or coral"), ({"domains": ["aws:us-east-1"]}, "one domain")],
)
def test_a_local_fleet_runs_vllm_in_its_own_domain(change: dict, message: str) -> None:
    content = {**read_scenario("local").model_dump(mode="json"), **change}
    with pytest.raises(ValidationError, match=message):
        ScenarioSpec.model_validate(content)


def test_groups_without_a_link_are_never_one_tensor_parallel_group(
    known: Known, performance: PerformanceModel
) -> None:
    """Two groups of one node are two engines: nothing was measured, or could be, for more."""
    spec = local()
    node = spec.fleet.nodes[0].model_copy(update={"cores": (("0", "1"),)})
    fleet = spec.fleet.model_copy(update={"nodes": (node,)})
    spec = spec.model_copy(update={"fleet": fleet, "node_classes": ("CPU-a x2",)})
    (found,) = resolve_scenario(spec, measured(known)).node_classes
    (workload,) = resolve_scenario(spec, measured(known)).workloads
    settings = spec.placement.settings()
    problem = build_phase_problem(
        workload, Phase.DECODE, [found], with_table(performance), settings
    )
    assert [(o.tp, o.dp) for o in problem.nodes["CPU-a x2"].options] == [(1, 2)]


LENGTHS = Lengths("l", 64, 32, 96, 48)


def placement(micro_batches: int, batch: int, groups: int = 1, cycle_ms: float = 20.0) -> Placement:
    stages = (Stage(0, 4, (StageNode("N x1", 1, groups, batch),)),)
    return Placement(stages, micro_batches, batch, cycle_ms, cycle_ms, 10.0)


@pytest.mark.parametrize(
    ("phase", "groups", "limits"),
    [
        # 8 decodes and 8 x 64 / 32 new tokens; room for a quarter and two more requests
        (Phase.AGGREGATED, 1, EngineLimits(24, 24)),
        (Phase.AGGREGATED, 4, EngineLimits(10, 10)),  # a quarter of the decodes
        (Phase.DECODE, 1, EngineLimits(16, 16)),  # vLLM asks for as many tokens as requests
        (Phase.PREFILL, 1, EngineLimits(16, 7 * 64 + 96)),
    ],
)
def test_an_engine_takes_what_the_placement_counts_on(
    phase: Phase, groups: int, limits: EngineLimits
) -> None:
    assert engine_limits(phase, placement(2, 8, groups), LENGTHS) == limits


def test_one_engine_over_unequal_nodes_takes_the_whole_batch() -> None:
    stages = (
        Stage(0, 2, (StageNode("N x1", 1, 1, 2), StageNode("N x2", 1, 2, 6))),
        Stage(2, 2, (StageNode("N x2", 2, 1, 8),)),
    )
    made = Placement(stages, 2, 8, 20.0, 20.0, 10.0)
    assert engine_limits(Phase.DECODE, made, LENGTHS) == EngineLimits(16, 16)


def template(phase: Phase, made: Placement) -> Template:
    return Template("t", "w", phase, (("N x1", 1),), made, 1.0, Provenance.MEASURED)


def test_figures_of_full_replicas() -> None:
    one = template(Phase.AGGREGATED, placement(2, 8))
    found = service_figures([one, one], LENGTHS)
    assert (found.in_flight, found.requests_per_s, found.output_tokens_per_s) == (32, 20.0, 640.0)
    assert (found.tpot_ms, found.ttft_ms) == (20.0, 4 * 20.0)  # a mean prompt in 32 / 8 chunks
    pair = [
        template(Phase.PREFILL, placement(1, 2, cycle_ms=50.0)),
        template(Phase.DECODE, placement(1, 8)),
    ]
    assert service_figures(pair, LENGTHS).ttft_ms == 70.0


def test_shapes_are_those_of_the_config() -> None:
    model = model_from_config("coral/tiny", CONFIG, "float32")
    attention = 2 * 512 * 512 + 2 * 512 * 256
    assert model.bytes_per_layer == 4 * (attention + 3 * 512 * 1024 + 2 * 512)
    assert model.kv_bytes_per_token_per_layer == 2 * 2 * 128 * 4
    assert model.total_bytes == 8 * model.bytes_per_layer + 2 * 4 * 512 * 512
    tied = model_from_config("m", {**CONFIG, "tie_word_embeddings": True}, "float16")
    assert tied.lm_head_bytes == tied.embed_bytes  # the last stage keeps its own


@pytest.mark.parametrize(
    ("change", "dtype", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "float32", "MambaForCausalLM are unknown; supp"),
        ({}, "int3", "unknown dtype 'int3'"),
        ({"hidden_size": None}, "float32", "config.json"),
    ],
)
def test_unknown_shapes_are_named(change: dict, dtype: str, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        model_from_config("m", {**CONFIG, **change}, dtype)

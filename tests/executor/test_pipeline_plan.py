"""Commands of Coral's pipelines, as values."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import zmq
from coral_vllm_pipeline.layout import ENVIRONMENT, Layout, read_layout

from executor.deployment import (
    Deployment,
    EngineSpec,
    NodeSpec,
    ReplicaSpec,
    StageSpec,
)
from executor.pipeline_plan import LAYOUT, derived_keys, plan_pipelines
from executor.stage_plan import EngineSettings, Host, ProcessPlan, ReplicaPlan, StagePlanError
from planner.types import Phase, Placement, Stage, StageNode

SETTINGS = EngineSettings(("vllm",), "/models/m", "org/m", 4096)
Shape = tuple[int, int, int]  # tensor parallel size, groups, batch


def placement(*stages: tuple[int, tuple[Shape, ...]]) -> Placement:
    """Stages of (layers, nodes)."""
    made, first = [], 0
    for layers, nodes in stages:
        found = tuple(StageNode(f"L4 x{tp * dp}", tp, dp, batch) for tp, dp, batch in nodes)
        made.append(Stage(first, layers, found))
        first += layers
    return Placement(tuple(made), 2, 8, 1.0, 1.0, 1.0)


def hosts_of(made: Placement, **changes: object) -> list[list[Host]]:
    numbers = itertools.count(1)
    return [
        [Host(f"h{n}", f"10.0.0.{n}", 9000, **changes) for n in itertools.islice(numbers, count)]
        for count in (len(stage.nodes) for stage in made.stages)
    ]


def planned(made: Placement, phase: Phase = Phase.AGGREGATED, **changes: object) -> ReplicaPlan:
    settings = replace(SETTINGS, **changes)
    return plan_pipelines(f"r-{phase}", phase, made, hosts_of(made), settings, "python", "secret")


def layout(process: ProcessPlan) -> Layout:
    return read_layout(process.environment[LAYOUT])


UNEQUAL = placement((3, ((1, 1, 2), (2, 2, 6))), (1, ((4, 1, 8),)))


def test_a_group_of_a_node_is_a_node_of_its_stage() -> None:
    plan = planned(UNEQUAL, kv_cache_bytes=5)
    head, *workers = plan.processes
    assert LAYOUT == ENVIRONMENT
    first, second = layout(head).stages
    assert [(n.tensor_parallel_size, n.weight, n.kv_bytes) for n in first.nodes] == [
        (1, 2.0, 5), (2, 3.0, 5), (2, 3.0, 5),
    ]  # fmt: skip
    assert [n.host for n in first.nodes] == ["10.0.0.1", "10.0.0.2", "10.0.0.2"]
    assert (first.layers, second.layers, second.nodes[0].tensor_parallel_size) == (3, 1, 4)
    assert plan.api_urls == ("http://10.0.0.1:9002",) and head.lease_id == "h1"
    assert [w.argv[-4:] for w in workers] == [
        ("-", "0", "0", "/models/m"), ("-", "0", "1", "/models/m"),
        ("-", "0", "2", "/models/m"), ("-", "1", "0", "/models/m"),
    ]  # fmt: skip
    assert [w.environment["CUDA_VISIBLE_DEVICES"] for w in workers] == [
        "0",
        "0,1",
        "2,3",
        "0,1,2,3",
    ]
    assert [w.lease_id for w in workers] == ["h1", "h2", "h2", "h3"]


def test_nobody_listens_where_another_does() -> None:
    head = planned(UNEQUAL, Phase.PREFILL).processes[0]
    made = layout(head)
    found = [made.commands, made.replies, "tcp://{}:{}".format(*made.rendezvous)]
    found.append(head.api_url.replace("http", "tcp") if head.api_url else "")
    for s, n, rank in made.places:
        node = made.stages[s].nodes[n]
        found += [node.hidden(rank), node.kv(rank)]
    assert len(set(found)) == len(found)


def test_prefix_caching_where_every_stage_is_one_node() -> None:
    uneven = planned(placement((3, ((1, 1, 8),)), (1, ((2, 1, 8),)))).processes[0]
    assert "--enable-prefix-caching" in uneven.argv
    assert "--no-enable-prefix-caching" in planned(UNEQUAL).processes[0].argv


def test_equal_groups_are_pipelines_side_by_side() -> None:
    plan = planned(placement((3, ((2, 2, 8),)), (1, ((1, 2, 8),))))
    assert len(plan.processes) == 6
    assert len(plan.api_urls) == len(set(plan.api_urls)) == 2
    first, second = (p for p in plan.processes if p.api_url)
    assert layout(first).public_key != layout(second).public_key
    assert "--enable-prefix-caching" in first.argv


def test_one_node_is_stock_vllm_unless_it_hands_kv_over() -> None:
    one = placement((4, ((2, 2, 8),)))
    assert [p.argv[:2] for p in planned(one).processes] == [("vllm", "serve")] * 2
    prefill = planned(one, Phase.PREFILL)
    decode = planned(placement((2, ((1, 1, 8),)), (2, ((1, 1, 8),))), Phase.DECODE)
    assert len(prefill.processes) == 4
    heads = [p for plan in (prefill, decode) for p in plan.processes if p.api_url]
    for head in heads:
        given = head.argv[head.argv.index("--kv-transfer-config") + 1]
        assert json.loads(given)["kv_connector_module_path"] == "coral_vllm_pipeline.connector"
    assert len({layout(head).kv_secret_key for head in heads}) == 1
    assert len({layout(head).secret_key for head in heads}) == 3


def test_a_node_without_a_share_gets_no_process() -> None:
    plan = planned(placement((3, ((1, 1, 8), (1, 1, 0))), (1, ((1, 1, 8),))))
    assert {p.lease_id for p in plan.processes} == {"h1", "h3"}


def test_cpu_nodes_bind_cores_by_the_layout() -> None:
    made = placement((3, ((1, 2, 8),)), (1, ((2, 1, 8),)))
    hosts = hosts_of(made, cores=("0-1", "2-3"))
    plan = plan_pipelines("r", Phase.AGGREGATED, made, hosts, SETTINGS, "python", "s")
    head = plan.processes[0]
    assert [n.cores for s in layout(head).stages for n in s.nodes] == [
        ("0-1",), ("2-3",), ("0-1", "2-3"),
    ]  # fmt: skip
    assert head.environment["OMP_NUM_THREADS"] == "1"
    assert all("CUDA_VISIBLE_DEVICES" not in p.environment for p in plan.processes)


def test_every_stage_fetches_its_own_layers_and_the_head_the_first_ones() -> None:
    plan = planned(placement((3, ((1, 1, 8),)), (1, ((1, 1, 8),))), weights="s3://bucket/m")
    head, first, second = plan.processes
    assert (first.argv[-1], second.argv[-1]) == ("/models/m/layers-0-2", "/models/m/layers-3-3")
    assert head.argv[4] == "/models/m/layers-0-2" and head.prepare == first.prepare
    assert second.prepare[-4:] == ("--first-layer", "3", "--layers", "1")


def test_keys_are_the_same_again_and_of_their_purpose() -> None:
    one = derived_keys("secret", "a")
    assert one == derived_keys("secret", "a") != derived_keys("secret", "b")
    assert derived_keys("other", "a") != one
    assert zmq.curve_public(one.secret.encode()).decode() == one.public
    assert planned(UNEQUAL).digest == planned(UNEQUAL).digest


def test_hosts_that_do_not_fit_are_refused() -> None:
    hosts = hosts_of(UNEQUAL)
    with pytest.raises(StagePlanError, match="other numbers of hosts than of nodes"):
        plan_pipelines("r", Phase.AGGREGATED, UNEQUAL, hosts[:1], SETTINGS, "python", "s")


def test_a_deployment_runs_pipelines_where_its_engine_has_them() -> None:
    def node(lease: str, port: int) -> NodeSpec:
        return NodeSpec(
            lease_id=lease, address="127.0.0.1", first_port=port, node_class="CPU x1",
            tensor_parallel_size=1, data_parallel_size=1, batch=1, cores=("0",),
        )  # fmt: skip

    stages = (
        StageSpec(first_layer=0, layers=3, nodes=(node("a", 9000),)),
        StageSpec(first_layer=3, layers=1, nodes=(node("b", 9100), node("c", 9200))),
    )
    replica = ReplicaSpec(id="r", model="m", phase=Phase.AGGREGATED, stages=stages)
    engine = EngineSpec(command=("vllm",), model_path="m", max_model_len=64)
    plain = Deployment(engines={"m": engine}, replicas=(replica,))
    assert "engine: coral" in plain.plans("secret").refused["r"]
    pipelines = engine.model_copy(update={"pipeline_python": "python", "transport": "gloo"})
    both = plain.model_copy(update={"engines": {"m": pipelines}})
    (plan,) = both.plans("secret").runnable.values()
    assert plan.leases == {"a", "b", "c"} and len(plan.api_urls) == 1
    assert layout(plan.processes[0]).transport == "gloo"

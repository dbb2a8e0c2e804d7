"""Commands of stages, as values."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from executor.stage_plan import (
    Connector,
    EngineSettings,
    Host,
    ProcessPlan,
    StagePlanError,
    plan_stages,
)
from planner.types import Phase, Placement, Stage, StageNode

SETTINGS = EngineSettings(("vllm",), "/models/m", "org/m", 4096)


def placement(*stages: tuple[int, int, int]) -> Placement:
    """Stages of one node: layers, tensor parallel size, groups."""
    made, first = [], 0
    for layers, tp, groups in stages:
        made.append(Stage(first, layers, (StageNode(f"L4 x{tp * groups}", tp, groups, 1),)))
        first += layers
    return Placement(tuple(made), 1, 1, 1.0, 1.0, 1.0)


def host(name: str, port: int = 9000, **changes: object) -> Host:
    return Host(name, f"10.0.0.{name[-1]}", port, **changes)


def options(process: ProcessPlan) -> dict[str, str]:
    words = process.argv
    return {w: v for w, v in itertools.pairwise(words) if w.startswith("--")}


def test_one_node_one_engine() -> None:
    plan = plan_stages("r", Phase.AGGREGATED, placement((32, 4, 1)), [host("h1")], SETTINGS)
    (process,) = plan.processes
    assert process.argv[:3] == ("vllm", "serve", "/models/m")
    found = options(process)
    assert found["--tensor-parallel-size"] == "4"
    assert found["--served-model-name"] == "org/m"
    assert "--pipeline-parallel-size" not in found
    assert "--headless" not in process.argv
    assert process.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert process.api_url == "http://10.0.0.1:9000"
    assert plan.api_urls == ("http://10.0.0.1:9000",)


def test_groups_of_a_node_are_engines_with_their_own_gpus_and_ports() -> None:
    plan = plan_stages("r", Phase.AGGREGATED, placement((32, 2, 4)), [host("h1")], SETTINGS)
    gpus = [process.environment["CUDA_VISIBLE_DEVICES"] for process in plan.processes]
    assert gpus == ["0,1", "2,3", "4,5", "6,7"]
    ports = [options(process)["--port"] for process in plan.processes]
    assert len(set(ports)) == 4
    assert len(plan.api_urls) == 4


def test_an_uneven_pipeline_over_two_nodes() -> None:
    hosts = [host("h1", 9000), host("h2", 9500)]
    plan = plan_stages("r", Phase.AGGREGATED, placement((24, 2, 1), (8, 2, 1)), hosts, SETTINGS)
    head, tail = plan.processes
    for rank, process in enumerate((head, tail)):
        found = options(process)
        assert found["--pipeline-parallel-size"] == found["--nnodes"] == "2"
        assert found["--node-rank"] == str(rank)
        assert (found["--master-addr"], found["--master-port"]) == ("10.0.0.1", "9001")
        assert found["--distributed-executor-backend"] == "mp"
        assert process.environment["VLLM_PP_LAYER_PARTITION"] == "24,8"
        assert process.environment["VLLM_HOST_IP"] == f"10.0.0.{rank + 1}"
    assert tail.argv[-1] == "--headless"
    assert tail.api_url is None
    assert plan.on("h2") == (tail,)
    assert plan.api_urls == ("http://10.0.0.1:9000",)


def test_prefill_and_decode_hand_over_by_a_connector() -> None:
    for phase in (Phase.PREFILL, Phase.DECODE):
        plan = plan_stages("r", phase, placement((32, 1, 2)), [host("h1")], SETTINGS)
        for process in plan.processes:
            transfer = json.loads(options(process)["--kv-transfer-config"])
            assert transfer["kv_connector"] == "NixlConnector"
        ports = [p.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for p in plan.processes]
        assert len(set(ports)) == 2
    folder = EngineSettings(
        ("vllm",), "m", "m", 64, connector=Connector.FOLDER, kv_folder="/shared/kv"
    )
    (process,) = plan_stages(
        "r", Phase.DECODE, placement((4, 1, 1)), [host("h1")], folder
    ).processes
    transfer = json.loads(options(process)["--kv-transfer-config"])
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": "/shared/kv"}


def test_cpu_hosts_bind_cores_and_name_no_gpu() -> None:
    hosts = [host("h1", cores=("0", "1"))]
    plan = plan_stages("r", Phase.AGGREGATED, placement((4, 1, 2)), hosts, SETTINGS)
    cores = [process.environment["VLLM_CPU_OMP_THREADS_BIND"] for process in plan.processes]
    assert cores == ["0", "1"]
    assert all("CUDA_VISIBLE_DEVICES" not in process.environment for process in plan.processes)


def test_engine_limits_are_the_replicas_and_kv_memory_is_the_nodes() -> None:
    settings = replace(SETTINGS, kv_cache_bytes=7, max_num_seqs=16, max_num_batched_tokens=48)
    hosts = [host("h1", kv_cache_bytes=1000), host("h2", 9500)]
    plan = plan_stages("r", Phase.AGGREGATED, placement((3, 1, 1), (1, 1, 1)), hosts, settings)
    head, tail = map(options, plan.processes)
    assert (head["--kv-cache-memory-bytes"], tail["--kv-cache-memory-bytes"]) == ("1000", "7")
    for found in (head, tail):
        assert (found["--max-num-seqs"], found["--max-num-batched-tokens"]) == ("16", "48")
    bare = plan_stages("r", Phase.AGGREGATED, placement((4, 1, 1)), [host("h1")], SETTINGS)
    assert not {"--max-num-seqs", "--kv-cache-memory-bytes"} & set(bare.processes[0].argv)


@pytest.mark.parametrize(
    ("phase", "stages", "hosts", "message"),
    [
        (Phase.AGGREGATED, ((3, 1, 1), (1, 2, 1)), 2, "one tensor parallel size"),
        (Phase.DECODE, ((3, 1, 1), (1, 1, 1)), 2, "replicas of one stage only"),
        (Phase.AGGREGATED, ((3, 1, 1), (1, 1, 1)), 1, "2 stages, but 1 hosts"),
    ],
)
def test_what_stock_vllm_cannot_run_is_refused(
    phase: Phase, stages: tuple[tuple[int, int, int], ...], hosts: int, message: str
) -> None:
    with pytest.raises(StagePlanError, match=message):
        plan_stages("r", phase, placement(*stages), [host(f"h{n}") for n in range(hosts)], SETTINGS)


def test_several_nodes_in_a_stage_are_refused() -> None:
    node = StageNode("L4 x1", 1, 1, 1)
    wide = Placement((Stage(0, 4, (node, node)),), 1, 1, 1.0, 1.0, 1.0)
    with pytest.raises(
        StagePlanError,
        match="one node per stage; plan with engine: vllm, or run it with engine: coral",
    ):
        plan_stages("r", Phase.AGGREGATED, wide, [host("h1")], SETTINGS)

"""`operate` on a local fleet: real agents and a real controller; a small server for vLLM."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from catalog.seed import import_seed
from catalog.store import Catalog
from executor.daemon import Daemon
from executor.deployment import ReplicaSpec, read_deployment
from executor.fleet import NoCapacityError
from executor.home import HomeFiles
from executor.local import LocalFleet, NoControllerError
from executor.routes import read_routes
from executor.vllm.environment import ModelFolderError, VllmError
from planner.engine import Engine
from planner.leases import LeaseState
from planner.scenario import ScenarioSpec
from planner.site import LocalSite
from tasks.fleet_view import end_fleet
from tasks.inputs import load_inputs
from tasks.library import build_phase, share_templates
from tasks.local_run import measurements_file
from tasks.local_site import CoresError, check_site
from tasks.operating import Round, lease_store, operate_once
from tasks.profile_file import read_measurements
from tasks.profile_tables import import_profile, profile_of
from tasks.scenario_file import read_scenario
from tasks.solving import Solvers
from tests.measurements import measurements

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
GIB = 2**30
FAKE = Path(__file__).parents[1] / "executor" / "fake_engine.py"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 512,
    "num_hidden_layers": 8,
}  # fmt: skip


def take_measurements(catalog: Catalog) -> Path:
    """The scenario's model as if `prepare` had measured it here; the file."""
    out = measurements_file(catalog.home, "CPU", CONFIG)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(measurements(config=CONFIG)))
    found = read_measurements(out)
    profile = profile_of(found, "coral/tiny", found.gpu("CPU"))
    import_profile(catalog, profile, NOW, replace=True)
    return out


def vllm_python(folder: Path, version: str = "0.32.0") -> Path:
    """Answers its vLLM's version; starts the small server for the launcher and for a pipeline's
    head, and something that only lives for its nodes.
    """
    found = folder / f"python-{version}"
    server = f"exec {sys.executable} {FAKE}"
    found.write_text(
        f'#!/bin/sh\ncase "$1 $2" in\n"-c "*) echo {version};;\n'
        f'"-m coral_vllm_pipeline.node") {server} --headless;;\n'
        f'*) shift; {server} "$@";;\nesac\n'
    )
    found.chmod(0o755)
    return found


def with_fleet(spec: ScenarioSpec, **changes: object) -> ScenarioSpec:
    return spec.model_copy(update={"fleet": spec.fleet.model_copy(update=changes)})


def with_engine(spec: ScenarioSpec, **changes: object) -> ScenarioSpec:
    engine = spec.fleet.engines["coral/tiny"].model_copy(update=changes)
    return with_fleet(spec, engines={"coral/tiny": engine})


def with_memory(spec: ScenarioSpec, *gib: float) -> ScenarioSpec:
    nodes = [
        node.model_copy(update={"memory_gib": m, "cores": (("0",),)})
        for node, m in zip(spec.fleet.nodes, gib, strict=True)
    ]
    return with_fleet(spec, nodes=tuple(nodes))


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    found = Catalog(tmp_path / "home")
    model = found.home / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    with found.write() as connection:
        import_seed(connection)
    take_measurements(found)
    return found


@pytest.fixture
def spec(catalog: Catalog, tmp_path: Path) -> ScenarioSpec:
    """Two nodes too small for the model; any machine has core 0."""
    python = str(vllm_python(tmp_path))
    return with_memory(with_engine(read_scenario("local"), python=python), 0.070, 0.045)


@pytest.fixture
def controller(catalog: Catalog) -> Iterator[Daemon]:
    ended = threading.Event()
    with Daemon(catalog.home, lease_s=10.0) as daemon:

        def work() -> None:
            while not ended.is_set():
                daemon.step(0.1)

        thread = threading.Thread(target=work)
        thread.start()
        yield daemon
        end_fleet(str(catalog.home))
        ended.set()
        thread.join(20)


def run(catalog: Catalog, spec: ScenarioSpec, minutes: int = 0) -> Round:
    inputs = load_inputs(catalog, spec)
    with Solvers(workers=0) as solvers:
        for phase in inputs.phases:
            build_phase(catalog, phase, solvers)
    share_templates(catalog, inputs.phases)
    return operate_once(catalog, spec, inputs, NOW + timedelta(minutes=minutes))


def until(condition: Callable[[], bool], seconds: float = 40.0) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not condition():
        time.sleep(0.1)
    return condition()


def deployed(catalog: Catalog) -> tuple[ReplicaSpec, ...]:
    return read_deployment(HomeFiles(catalog.home).deployment).replicas


def routed(catalog: Catalog) -> set[str]:
    return {r.replica_id for r in read_routes(HomeFiles(catalog.home).routes).routes}


def running(catalog: Catalog) -> list[str]:
    """Leases whose agents run."""
    fleet = LocalFleet(catalog.home)
    files = (catalog.home / "agents").glob("*/agent.json")
    return sorted(f.parent.name for f in files if fleet.slot(f.parent.name) is not None)


def test_a_round_brings_up_what_the_plan_says(
    catalog: Catalog, spec: ScenarioSpec, controller: Daemon
) -> None:
    found = run(catalog, spec)
    assert (found.applied.launched, found.applied.failed) == (2, 0)
    (replica,) = deployed(catalog)
    nodes = [node for stage in replica.stages for node in stage.nodes]
    assert {node.node_class for node in nodes} == {"CPU-a x1", "CPU-b x1"}
    assert sum(stage.layers for stage in replica.stages) == 8
    assert replica.stages[0].layers != replica.stages[1].layers  # unequal memory
    (model,) = {phase.workload.model for phase in load_inputs(catalog, spec).phases}
    for stage, node in zip(replica.stages, nodes, strict=True):
        memory = {"CPU-a x1": 0.070, "CPU-b x1": 0.045}[node.node_class] * GIB
        weights = stage.layers * model.bytes_per_layer + model.embed_bytes
        assert node.kv_cache_bytes == pytest.approx(memory - weights, abs=1)
    rooms = zip(replica.stages, nodes, strict=True)
    per_token = model.kv_bytes_per_token_per_layer
    held = min((node.kv_cache_bytes or 0) // (s.layers * per_token) for s, node in rooms)
    assert replica.kv_tokens == held
    assert len({node.first_port for node in nodes}) == 2
    assert replica.share == pytest.approx(1.0)
    assert replica.max_num_seqs is not None
    assert until(lambda: routed(catalog) == {replica.id})
    before = running(catalog)
    again = run(catalog, spec, 10)
    assert again.applied.nothing
    assert running(catalog) == before
    assert deployed(catalog) == (replica,)


def test_what_leaves_drains_and_ends_by_itself(
    catalog: Catalog, spec: ScenarioSpec, controller: Daemon
) -> None:
    """With more memory the model fits on the cheap node alone: the other one goes."""
    run(catalog, spec)
    (pipeline,) = deployed(catalog)
    assert until(lambda: routed(catalog) == {pipeline.id})
    found = run(catalog, with_memory(spec, 0.5, 0.4), 10)
    assert found.applied.terminated == 1
    (single,) = deployed(catalog)
    assert len(single.stages) == 1
    (left,) = running(catalog)
    assert single.lease_ids == {left}
    assert until(lambda: routed(catalog) == {single.id})
    (gone,) = pipeline.lease_ids - {left}
    log = (catalog.home / "agents" / gone / "agent.log").read_text()
    assert "the controller ended the lease" in log  # nobody had to kill it


def test_a_node_whose_agent_died_is_launched_again(
    catalog: Catalog, spec: ScenarioSpec, controller: Daemon
) -> None:
    run(catalog, spec)
    (replica,) = deployed(catalog)
    victim = sorted(replica.lease_ids)[0]
    known = json.loads((catalog.home / "agents" / victim / "agent.json").read_text())
    psutil.Process(known["pid"]).kill()
    found = run(catalog, spec, 10)
    assert found.applied.launched == 1
    states = {lease.id: lease for lease in lease_store(catalog).all()}
    assert states[victim].state is LeaseState.TERMINATED
    assert states[victim].reason == "its node is gone"
    (again,) = deployed(catalog)
    assert len(again.lease_ids) == 2
    assert victim not in again.lease_ids
    assert until(lambda: len(routed(catalog)) == 1)


def test_a_pipeline_of_corals_own_is_brought_up_and_rebuilt_on_another_node(
    catalog: Catalog, spec: ScenarioSpec, controller: Daemon
) -> None:
    spec = spec.model_copy(update={"engine": Engine.CORAL})
    run(catalog, spec)
    (replica,) = deployed(catalog)
    assert until(lambda: routed(catalog) == {replica.id})
    logs = [path.name for path in (catalog.home / "agents").glob(f"*/{replica.id}-*.log")]
    ends = ["pipe0-head.log", "pipe0-stage0-node0.log", "pipe0-stage1-node0.log"]
    assert sorted(logs) == [f"{replica.id}-{end}" for end in ends]
    victim = replica.stages[1].nodes[0].lease_id
    known = json.loads((catalog.home / "agents" / victim / "agent.json").read_text())
    psutil.Process(known["pid"]).kill()
    found = run(catalog, spec, 10)
    assert found.applied.launched == 1
    (again,) = deployed(catalog)
    assert victim not in again.lease_ids and len(again.lease_ids) == 2
    assert until(lambda: routed(catalog) == {again.id})


def test_down_ends_all_nodes(catalog: Catalog, spec: ScenarioSpec, controller: Daemon) -> None:
    run(catalog, spec)
    assert len(running(catalog)) == 2
    assert end_fleet(str(catalog.home)) == 2
    assert running(catalog) == []
    assert deployed(catalog) == ()


def test_a_type_has_no_more_nodes_than_the_site(
    catalog: Catalog, spec: ScenarioSpec, controller: Daemon
) -> None:
    run(catalog, spec)
    fleet = LocalFleet(catalog.home, {"cpu-a": (("0",),), "cpu-b": (("0",),)})
    lease = lease_store(catalog).all()[0]
    with pytest.raises(NoCapacityError, match="all 1 nodes of type cpu-"):
        fleet.launch(replace(lease, id="another"), NOW)


def test_without_a_controller_nothing_is_begun(catalog: Catalog, spec: ScenarioSpec) -> None:
    with pytest.raises(NoControllerError, match="start one with `coral controller`"):
        run(catalog, spec)
    assert lease_store(catalog).all() == []


def test_what_would_keep_engines_from_starting_is_found_first(
    catalog: Catalog, spec: ScenarioSpec, tmp_path: Path
) -> None:
    old = str(vllm_python(tmp_path, "0.31.2"))
    for changed, kind, message in (
        (with_engine(spec, python="no/python"), VllmError, r"no interpreter at no/python.*setup-"),
        (with_engine(spec, python=old), VllmError, r"has vLLM 0.31.2, Coral starts 0.32\.\*"),
        (with_engine(spec, python=sys.executable), VllmError, r"no vLLM in the environment of"),
        (with_engine(spec, path="no/model"), ModelFolderError, r"no model in .*no/model"),
        (with_cores(spec, "4000"), CoresError, r"cpu-a names core 4000, but this machine has 0"),
        (with_cores(spec, "x"), CoresError, r"cores 'x'; write them as 0 or 0-3"),
    ):
        with pytest.raises(kind, match=message):
            check_site(catalog.home, changed)
    with pytest.raises(VllmError):
        run(catalog, with_engine(spec, python=old))
    assert lease_store(catalog).all() == []


def with_cores(spec: ScenarioSpec, cores: str) -> ScenarioSpec:
    site: LocalSite = spec.fleet
    first = site.nodes[0].model_copy(update={"cores": ((cores,),)})
    return with_fleet(spec, nodes=(first, *site.nodes[1:]))

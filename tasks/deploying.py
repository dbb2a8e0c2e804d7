"""From a plan and its leases to the deployment that the controller brings up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.aws.groups import FIRST_PORT
from executor.deployment import (
    Deployment,
    EngineSpec,
    NodeSpec,
    ReplicaSpec,
    StageSpec,
    read_deployment,
    write_deployment,
)
from executor.home import HomeFiles
from executor.local import ADDRESS, LocalFleet
from executor.routes import Objective
from planner.engine import engine_limits
from planner.leases import Lease
from planner.placement.profile import NodeOption, PhaseProblem
from planner.replicas import Replica, ReplicaKey
from planner.scenario import ScenarioSpec
from planner.types import Phase, Slo, Stage, StageNode, Template, Workload
from tasks.aws_site import aws_engines
from tasks.inputs import Inputs
from tasks.local_site import engine_specs


@dataclass(frozen=True)
class Wanted:
    """What a scenario wants to run: its replicas, their nodes, and the plan's load."""

    inputs: Inputs
    templates: Mapping[str, Template]
    replicas: Sequence[Replica]
    leases: Sequence[Lease]  # held ones
    load_rps: Mapping[ReplicaKey, float]  # of all replicas of a template in a domain


@dataclass(frozen=True, slots=True)
class Place:
    """Where a lease's processes run."""

    first_port: int
    address: str = ""  # '': where the node enrolled from
    cores: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ground:
    """What a kind of fleet gives a deployment: places, keys, engines."""

    places: Mapping[str, Place]  # by lease id
    engines: Mapping[str, EngineSpec]
    keys: Mapping[str, str]
    enrolling: tuple[str, ...] = ()


def local_ground(fleet: LocalFleet, spec: ScenarioSpec, leases: Sequence[Lease]) -> Ground:
    """Agents of this machine, with the keys that were made for them."""
    slots = {lease.id: slot for lease in leases if (slot := fleet.slot(lease.id))}
    return Ground(
        {name: Place(slot.first_port, ADDRESS, slot.cores) for name, slot in slots.items()},
        engine_specs(fleet.home, spec),
        {lease.id: fleet.public_key(lease.id) for lease in leases},
    )


def aws_ground(spec: ScenarioSpec, leases: Sequence[Lease]) -> Ground:
    """Nodes that enrol when they have come up; their replicas start then by themselves."""
    names = tuple(lease.id for lease in leases)
    places = {name: Place(FIRST_PORT) for name in names}  # a node has its machine to itself
    return Ground(places, aws_engines(spec), {}, enrolling=names)


def deploy(home: Path, wanted: Wanted, ground: Ground, others: Sequence[Lease]) -> None:
    """Write the deployment; what runs on other scenarios' leases stays in it."""
    path = HomeFiles(home).deployment
    foreign = {lease.id for lease in others}
    known = read_deployment(path) if foreign else Deployment()
    scenario = wanted.inputs.scenario
    # Another scenario of the home may start the same model in another way.
    names = {model: f"{model}, {scenario.name}" for model in ground.engines}
    made = [
        replica.model_copy(update={"engine": names[replica.model]})
        for replica in replica_specs(wanted, ground.places)
    ]
    kept = [replica for replica in known.replicas if replica.lease_ids <= foreign]
    theirs = {replica.engine or replica.model for replica in kept}
    keys = {name: key for name, key in known.lease_keys.items() if name in foreign}
    enrolling = [name for name in known.enrolling if name in foreign]
    write_deployment(
        path,
        Deployment(
            engines={
                **{name: one for name, one in known.engines.items() if name in theirs},
                **{names[model]: one for model, one in ground.engines.items()},
            },
            lease_keys={**keys, **ground.keys},
            enrolling=(*enrolling, *ground.enrolling),
            replicas=(*kept, *made),
            objectives={**known.objectives, **_objectives(scenario.workloads)},
        ),
    )


def _objectives(workloads: Iterable[Workload]) -> dict[str, Objective]:
    """Of every model; requests do not say of which workload they are, so the tightest count."""
    found: dict[str, list[Slo]] = defaultdict(list)
    for workload in workloads:
        found[workload.model.name].append(workload.slo)
    return {
        model: Objective(ttft_ms=min(x.ttft_ms for x in slos), tpot_ms=min(x.tpot_ms for x in slos))
        for model, slos in found.items()
    }


def replica_specs(wanted: Wanted, places: Mapping[str, Place]) -> list[ReplicaSpec]:
    """Replicas that have all their nodes, each with its stages, limits and share of requests."""
    workloads = {workload.name: workload for workload in wanted.inputs.scenario.workloads}
    problems = {(p.workload.name, p.problem.phase): p.problem for p in wanted.inputs.phases}
    shares = _shares(wanted, workloads)
    nodes: dict[str, list[Lease]] = defaultdict(list)
    for lease in sorted(wanted.leases, key=lambda lease: (lease.created_at, lease.id)):
        if lease.replica is not None and lease.id in places:
            nodes[lease.replica].append(lease)
    found = []
    for replica in wanted.replicas:
        template = wanted.templates[replica.template_id]
        workload = workloads[template.workload]
        problem = problems[workload.name, template.phase]
        stages = _stages(template, problem, nodes[replica.id], places)
        if stages is None:  # a launch failed: it has not all its nodes
            continue
        limits = engine_limits(template.phase, template.placement, workload.lengths)
        found.append(
            ReplicaSpec(
                id=replica.id,
                model=workload.model.name,
                phase=template.phase,
                stages=stages,
                domain=replica.domain,
                template_id=template.id,
                share=shares[replica.id],
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                kv_tokens=_kv_tokens(template, problem),
            )
        )
    return found


def _stages(
    template: Template,
    problem: PhaseProblem,
    leases: Sequence[Lease],
    places: Mapping[str, Place],
) -> tuple[StageSpec, ...] | None:
    """Leases by class, the oldest to the first stage of theirs; None where one is missing."""
    free = {name: [x for x in leases if x.node_class == name] for name, _ in template.combination}
    made = []
    last = len(template.placement.stages) - 1
    for number, stage in enumerate(template.placement.stages):
        nodes = []
        for node in stage.nodes:
            if not free[node.node_class]:
                return None
            lease = free[node.node_class].pop(0)
            room = _kv_bytes(problem, stage, node, first=number == 0, last=number == last)
            nodes.append(_node(lease.id, node, places[lease.id], room))
        made.append(
            StageSpec(first_layer=stage.first_layer, layers=stage.layers, nodes=tuple(nodes))
        )
    return tuple(made)


def _kv_bytes(
    problem: PhaseProblem, stage: Stage, node: StageNode, *, first: bool, last: bool
) -> int:
    """Of one GPU: what the plan counted on beside the stage's weights (P4)."""
    option = _option(problem, node)
    return int(option.kv_room_bytes(stage.layers, first=first, last=last))


def _kv_tokens(template: Template, problem: PhaseProblem) -> int:
    """That the stage with the least room holds."""
    stages, tokens = template.placement.stages, []
    for number, stage in enumerate(stages):
        for node in stage.nodes:
            ends = {"first": number == 0, "last": number == len(stages) - 1}
            room = _kv_bytes(problem, stage, node, **ends)
            tokens.append(room // (stage.layers * _option(problem, node).kv_bytes))
    return int(min(tokens))


def _option(problem: PhaseProblem, node: StageNode) -> NodeOption:
    options = problem.nodes[node.node_class].options
    return next(option for option in options if option.tp == node.tensor_parallel_size)


def _node(lease_id: str, node: StageNode, place: Place, kv_cache_bytes: int) -> NodeSpec:
    return NodeSpec(
        lease_id=lease_id,
        address=place.address,
        first_port=place.first_port,
        node_class=node.node_class,
        tensor_parallel_size=node.tensor_parallel_size,
        data_parallel_size=node.data_parallel_size,
        batch=node.batch,
        cores=place.cores,
        kv_cache_bytes=kv_cache_bytes,
    )


def _shares(wanted: Wanted, workloads: Mapping[str, Workload]) -> Mapping[str, float]:
    """Of its model's requests that each replica takes, as the plan loads them; else equal ones."""

    def model_of(replica: Replica) -> str:
        return workloads[wanted.templates[replica.template_id].workload].model.name

    def phase_of(replica: Replica) -> Phase:
        return wanted.templates[replica.template_id].phase

    counts = Counter(replica.key for replica in wanted.replicas)
    load = {r.id: wanted.load_rps.get(r.key, 0.0) / counts[r.key] for r in wanted.replicas}
    total: dict[str, float] = defaultdict(float)
    answering: Counter[str] = Counter()
    for replica in wanted.replicas:
        if phase_of(replica) is not Phase.PREFILL:
            total[model_of(replica)] += load[replica.id]
            answering[model_of(replica)] += 1
    return {
        r.id: load[r.id] / total[model_of(r)]
        if total[model_of(r)] > 0
        else 1.0 / max(1, answering[model_of(r)])
        for r in wanted.replicas
    }

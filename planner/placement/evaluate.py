"""Recheck a placement from the node profiles, apart from the search.

It shares the arithmetic of hops and networks with the search, nothing else. Every template is
rechecked before it is stored: a rounding or a trimming mistake must never reach a plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.errors import CoralError
from planner.placement.profile import NodeOption, PhaseProblem
from planner.placement.stages import Role, handover_ms, hop_ms, network_ms
from planner.types import (
    Combination,
    Placement,
    Provenance,
    Stage,
    StageNode,
    Template,
    describe_combination,
)

SLACK = 1.0 + 1e-6


class PlacementCheckError(CoralError):
    """A placement that the solver returned breaks a constraint: a defect of the solver."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a placement really does."""

    cycle_ms: float
    latency_ms: float
    raw_rps: float
    provenance: Provenance


def evaluate(problem: PhaseProblem, combination: Combination, placement: Placement) -> Evaluation:
    """Cycle, latency and throughput of a placement.

    Raises PlacementCheckError: it breaks P1 to P5.
    """
    terms = problem.terms
    where = f"{problem.workload} {problem.phase} on {describe_combination(combination)}"
    _check_layers(placement, terms.layers, where)
    _check_nodes(placement, combination, where)
    steps, latencies, provenances = [], [], []
    for index, stage in enumerate(placement.stages):
        role = Role.at(index, len(placement.stages))
        times = [_node(problem, stage, node, role, placement, where) for node in stage.nodes]
        steps.append(max(step for step, _, _ in times))
        latencies.append(max(latency for _, latency, _ in times))
        provenances += [provenance for _, _, provenance in times]
    hops = (len(steps) - 1) * hop_ms(problem, combination, placement.micro_batch_size)
    latency = sum(latencies) + hops
    if problem.phase.in_cycles:
        cycle = latency = max(latency, placement.micro_batches * max(steps))
        requests = placement.micro_batches * placement.micro_batch_size
    else:
        cycle, requests = max(steps), placement.micro_batch_size
    if latency > terms.budget_ms * SLACK:
        raise PlacementCheckError(
            f"{where}: {latency:.1f} ms is over the budget of {terms.budget_ms:.1f} ms (P5)"
        )
    share = min(n.batch // n.data_parallel_size for s in placement.stages for n in s.nodes)
    if problem.phase.in_cycles and cycle > terms.longest_cycle_ms(share) * SLACK:
        raise PlacementCheckError(f"{where}: a p95 prompt's chunks take too long (P5)")
    rps = requests * 1e3 / (terms.tokens_per_cycle * cycle)
    return Evaluation(cycle, latency, rps, Provenance.worst(*provenances))


def make_template(
    problem: PhaseProblem, combination: Combination, placement: Placement
) -> Template:
    """Recheck a placement and name it.

    Raises PlacementCheckError: the placement breaks a constraint or misstates its throughput.
    """
    found = evaluate(problem, combination, placement)
    for name in ("raw_rps", "cycle_ms", "latency_ms"):
        said, real = getattr(placement, name), getattr(found, name)
        if not math.isclose(said, real, rel_tol=1e-6):
            raise PlacementCheckError(
                f"{problem.workload} {problem.phase} on {describe_combination(combination)}: "
                f"the solver says {name} {said:.6g}, the recheck {real:.6g}"
            )
    return Template(
        id=problem.key(combination),
        workload=problem.workload,
        phase=problem.phase,
        combination=combination,
        placement=placement,
        throughput_rps=placement.raw_rps * problem.terms.utilization,
        provenance=found.provenance,
    )


def _check_layers(placement: Placement, layers: int, where: str) -> None:
    expected = 0
    for stage in placement.stages:
        if stage.first_layer != expected or stage.layers < 1:
            raise PlacementCheckError(f"{where}: stages are not contiguous (P1)")
        expected += stage.layers
    if expected != layers:
        raise PlacementCheckError(f"{where}: {expected} layers placed instead of {layers} (P1)")


def _check_nodes(placement: Placement, combination: Combination, where: str) -> None:
    used: dict[str, int] = {}
    for stage in placement.stages:
        if sum(node.batch for node in stage.nodes) < placement.micro_batch_size:
            raise PlacementCheckError(f"{where}: a stage serves less than its micro-batch (P3)")
        for node in stage.nodes:
            used[node.node_class] = used.get(node.node_class, 0) + 1
    if any(count > dict(combination).get(name, 0) for name, count in used.items()):
        raise PlacementCheckError(f"{where}: it uses nodes that it does not have (P2)")


def _node(
    problem: PhaseProblem,
    stage: Stage,
    node: StageNode,
    role: Role,
    placement: Placement,
    where: str,
) -> tuple[float, float, Provenance]:
    """Step and latency of one node's share, in ms, after checking its memory."""
    profile = problem.nodes[node.node_class]
    option = _option(profile.options, node, where)
    share = math.ceil(node.batch / option.dp)
    weights = option.layer_bytes * stage.layers
    weights += option.embed_bytes * role.is_first + option.lm_head_bytes * role.is_last
    in_flight = placement.micro_batches * share
    tokens = in_flight * problem.terms.kv_tokens + problem.terms.kv_tokens_extra
    if weights + tokens * option.kv_bytes * stage.layers > option.free_bytes * SLACK:
        raise PlacementCheckError(f"{where}: {node.node_class} lacks memory (P4)")
    if handover_ms(problem, profile, stage.layers, node.batch) > problem.terms.handover_ms * SLACK:
        raise PlacementCheckError(f"{where}: {node.node_class} hands its KV over too slowly (P5)")
    once = option.overhead_ms + (option.head_ms[share - 1] if role.is_last else 0.0)
    step = stage.layers * option.layer_ms[share - 1] + once
    step = max(step, float(network_ms(problem, profile, role, stage.layers, node.batch)))
    latency = stage.layers * option.latency_layer_ms[share - 1] + once
    if problem.phase.in_cycles:
        latency = step
    return float(step), float(latency), option.provenance


def _option(options: tuple[NodeOption, ...], node: StageNode, where: str) -> NodeOption:
    for option in options:
        if (option.tp, option.dp) == (node.tensor_parallel_size, node.data_parallel_size):
            return option
    raise PlacementCheckError(f"{where}: {node.node_class} has no such tensor parallel size")

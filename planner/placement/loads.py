"""Times of a placement's stages when its micro-batches are not full.

Stages, options and shares stay in proportion: with r = x / b, the part of a full micro-batch that
is filled, every node has its share of x requests.
Source: docs/formulation.md, section 4, "Shared replicas"; section 12.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.perf.grids import Floats
from planner.placement.profile import NodeOption, PhaseProblem
from planner.placement.stages import Role, handover_ms, hop_ms, network_ms
from planner.types import Combination, Placement, Stage, StageNode

Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True)
class StageTimes:
    """Of one stage, by the loads asked for."""

    step_ms: Floats
    latency_ms: Floats  # prefill: with one p95 prompt
    fits: Flags


@dataclass(frozen=True)
class LoadTimes:
    """Of all stages, by the loads asked for."""

    stages: tuple[StageTimes, ...]
    hops_ms: Floats  # all together

    @property
    def slowest_ms(self) -> Floats:
        """The step of the slowest stage."""
        found: Floats = np.maximum.reduce([stage.step_ms for stage in self.stages])
        return found

    @property
    def latency_ms(self) -> Floats:
        """Through all stages, with one p95 prompt."""
        found: Floats = np.add.reduce([stage.latency_ms for stage in self.stages]) + self.hops_ms
        return found

    @property
    def fits(self) -> Flags:
        """Whether memory and hand-over hold (P4, P5)."""
        found: Flags = np.logical_and.reduce([stage.fits for stage in self.stages])
        return found

    def cycle_ms(self, micro_batches: Floats | int) -> Floats:
        """C of P5 with so many micro-batches under way."""
        summed = np.add.reduce([stage.step_ms for stage in self.stages]) + self.hops_ms
        found: Floats = np.maximum(summed, micro_batches * self.slowest_ms)
        return found


def at_load(
    problem: PhaseProblem, combination: Combination, placement: Placement, share: Floats
) -> LoadTimes:
    """At parts r of a full micro-batch, of shape (n,); a group has at least one request."""
    count = len(placement.stages)
    size = share * placement.micro_batch_size
    return LoadTimes(
        tuple(
            _stage_times(problem, placement, stage, Role.at(index, count), share)
            for index, stage in enumerate(placement.stages)
        ),
        (count - 1) * np.array([hop_ms(problem, combination, float(x)) for x in size]),
    )


def group_of(node: StageNode) -> int:
    """Requests of a micro-batch in the largest group of a node."""
    return -(-node.batch // node.data_parallel_size)


def _stage_times(
    problem: PhaseProblem, placement: Placement, stage: Stage, role: Role, share: Floats
) -> StageTimes:
    parts = [_node_times(problem, placement, stage, node, role, share) for node in stage.nodes]
    return StageTimes(
        np.maximum.reduce([part.step_ms for part in parts]),
        np.maximum.reduce([part.latency_ms for part in parts]),
        np.logical_and.reduce([part.fits for part in parts]),
    )


def _node_times(
    problem: PhaseProblem,
    placement: Placement,
    stage: Stage,
    node: StageNode,
    role: Role,
    share: Floats,
) -> StageTimes:
    """One node's, with its groups' requests between whole numbers; below one, of one."""
    terms, profile = problem.terms, problem.nodes[node.node_class]
    option = next(
        o
        for o in profile.options
        if (o.tp, o.dp) == (node.tensor_parallel_size, node.data_parallel_size)
    )
    requests = group_of(node) * share
    once = option.overhead_ms + (_at(option.head_ms, requests) if role.is_last else 0.0)
    step = stage.layers * _at(option.layer_ms, requests) + once
    latency = stage.layers * _at(option.latency_layer_ms, requests) + once
    batch = node.batch * share
    step = np.maximum(step, network_ms(problem, profile, role, stage.layers, batch))
    fits = _held(option, problem, stage, role, placement.micro_batches * requests)
    fits &= handover_ms(problem, profile, stage.layers, batch) <= terms.handover_ms * (1.0 + 1e-9)
    return StageTimes(step, latency, fits)


def _held(
    option: NodeOption, problem: PhaseProblem, stage: Stage, role: Role, in_flight: Floats
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """P4 of one group."""
    room = option.kv_room_bytes(stage.layers, first=role.is_first, last=role.is_last)
    tokens = in_flight * problem.terms.kv_tokens + problem.terms.kv_tokens_extra
    return np.asarray(tokens * option.kv_bytes * stage.layers <= room * (1.0 + 1e-9))


def _at(by_batch: Floats, requests: Floats) -> Floats:
    return np.interp(requests, np.arange(1.0, by_batch.size + 1.0), by_batch)

"""Times of one stage: any group of nodes, any number of layers, any micro-batch size.

A stage splits its micro-batch so that its slowest node is as fast as possible. With `t_i(x)` the
step time of node i for x requests (non-decreasing in x), each node offers slots t_i(1) <= t_i(2)
<= ..., and the best split of b takes the b cheapest slots of all nodes: its time is the b-th
smallest slot, its shares are how many slots of each node were taken (docs/formulation.md, P3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations_with_replacement, product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.perf.grids import Floats
from planner.placement.combinations import sub_multisets
from planner.placement.profile import NodeOption, NodeProfile, PhaseProblem
from planner.types import Combination, Phase, StageNode

GBIT_PER_MS = 1e6  # bits per ms at 1 Gbit/s


class Role(Enum):
    """Where a stage stands: the first holds the embedding, the last the head.

    (holds the embedding, holds the head, receives activations, sends activations).
    """

    ONLY = (True, True, False, False)
    FIRST = (True, False, False, True)
    MIDDLE = (False, False, True, True)
    LAST = (False, True, True, False)
    NOWHERE = (False, False, False, False)  # in no pipeline: a lower bound of all the others

    @classmethod
    def at(cls, index: int, stages: int) -> Role:
        """Role of a stage by its position."""
        if stages == 1:
            return cls.ONLY
        if index == 0:
            return cls.FIRST
        return cls.LAST if index == stages - 1 else cls.MIDDLE

    @property
    def is_first(self) -> bool:
        return self.value[0]

    @property
    def is_last(self) -> bool:
        return self.value[1]

    @property
    def receives(self) -> bool:
        return self.value[2]

    @property
    def sends(self) -> bool:
        return self.value[3]


Unit = tuple[str, int]  # node class and which of its options; BEST takes the fastest per point
Group = tuple[tuple[Unit, int], ...]  # the nodes of one stage: units with their counts
BEST = -1


@dataclass(frozen=True)
class StageTimes:
    """Times of one group in one role, shape (layers + 1, largest batch + 1), by [l, b]."""

    step_ms: Floats  # tau_s of P3; infinite where memory or the KV hand-over does not fit
    latency_ms: Floats  # with one p95 request in the micro-batch; in cycles the same as step_ms
    group_share: NDArray[np.int_]  # requests of the least loaded tensor parallel group at work


@dataclass
class StageTable:
    """Stage times of one phase problem, computed once for every group, role and M."""

    problem: PhaseProblem
    _stages: dict[tuple[Group, Role, int], StageTimes] = field(default_factory=dict)
    _options: dict[tuple[str, Role, int], NDArray[np.int8]] = field(default_factory=dict)
    _variants: dict[Combination, list[Group]] = field(default_factory=dict)
    _work: dict[tuple[str, int, int], tuple[Floats, Floats]] = field(default_factory=dict)

    def variants(self, part: Combination) -> list[Group]:
        """Every way to make one stage of exactly these nodes.

        Decode: the faster option of a node is also the one of least latency, so each node takes
        its best. Elsewhere 8 x TP1 has the throughput, 1 x TP8 the latency, so each is a choice.
        """
        if part not in self._variants:
            choices = [
                [
                    tuple(sorted(Counter(units).items()))
                    for units in combinations_with_replacement(self._units(name), count)
                ]
                for name, count in part
            ]
            self._variants[part] = [
                tuple(unit for units in chosen for unit in units) for chosen in product(*choices)
            ]
        return self._variants[part]

    def groups(self, combination: Combination) -> Iterator[Group]:
        """Every way to make one stage of some of the combination's nodes."""
        for part in sub_multisets(combination):
            yield from self.variants(part)

    def work(self, name: str, micro_batches: int, batch: int, cap_ms: float) -> float:
        """Most request-layers that one node does within `cap_ms` of a micro-batch of `batch`."""
        key = (name, micro_batches, batch)
        if key not in self._work:
            self._work[key] = self._work_frontier(name, micro_batches, batch)
        times, amounts = self._work[key]
        position = int(np.searchsorted(times, cap_ms, side="right")) - 1
        return float(amounts[position]) if position >= 0 else 0.0

    def _work_frontier(self, name: str, micro_batches: int, batch: int) -> tuple[Floats, Floats]:
        """Step times and the most layers x requests within each, both increasing."""
        stacked = [
            self.stage(group, Role.NOWHERE, micro_batches).step_ms[:, : batch + 1]
            for group in self.variants(((name, 1),))
        ]
        step = np.minimum.reduce(stacked)
        amount = np.outer(np.arange(step.shape[0]), np.arange(batch + 1)).astype(float)
        finite = np.isfinite(step) & (amount > 0)
        times, amounts = step[finite], amount[finite]
        order = np.lexsort((-amounts, times))
        times, amounts = times[order], amounts[order]
        rising = np.diff(np.maximum.accumulate(amounts), prepend=0.0) > 0
        return times[rising], amounts[rising]

    def stage(self, group: Group, role: Role, micro_batches: int) -> StageTimes:
        """Times of a group as one stage."""
        key = (group, role, micro_batches)
        if key not in self._stages:
            if sum(count for _, count in group) == 1:
                self._stages[key] = self._unit_times(group[0][0], role, micro_batches)
            else:
                self._stages[key] = self._merge(group, role, micro_batches)
        return self._stages[key]

    def column(
        self, group: Group, role: Role, micro_batches: int, batch: int, least_share: int
    ) -> tuple[Floats, Floats]:
        """Step and latency by layers; infinite latency where a group's share is too small."""
        times = self.stage(group, role, micro_batches)
        step, latency = times.step_ms[:, batch], times.latency_ms[:, batch]
        if least_share:
            latency = np.where(times.group_share[:, batch] >= least_share, latency, np.inf)
        return step, latency

    def shares(
        self, group: Group, role: Role, micro_batches: int, layers: int, batch: int
    ) -> tuple[StageNode, ...]:
        """The nodes of a stage with their shares of the micro-batch; idle nodes left out."""
        units = _units_of(group)
        times = [self.stage(((unit, 1),), role, micro_batches).step_ms for unit in units]
        slots = np.concatenate([step[layers, 1 : batch + 1] for step in times])
        taken = np.argsort(slots, kind="stable")[:batch] // batch
        nodes = []
        for index, (name, which) in enumerate(units):
            share = int((taken == index).sum())
            if share == 0:
                continue
            if which == BEST:
                which = int(self._options[(name, role, micro_batches)][layers, share])
            option = self.problem.nodes[name].options[which]
            nodes.append(StageNode(name, option.tp, option.dp, share))
        return tuple(nodes)

    def _units(self, name: str) -> list[Unit]:
        if self.problem.phase is Phase.DECODE:
            return [(name, BEST)]
        return [(name, which) for which in range(len(self.problem.nodes[name].options))]

    def _unit_times(self, unit: Unit, role: Role, micro_batches: int) -> StageTimes:
        name, which = unit
        node = self.problem.nodes[name]
        if which != BEST:
            return _node_times(self.problem, node, node.options[which], role, micro_batches)
        times = np.stack(
            [
                _node_times(self.problem, node, option, role, micro_batches).step_ms
                for option in node.options
            ]
        )
        self._options[(name, role, micro_batches)] = np.argmin(times, axis=0).astype(np.int8)
        best = times.min(axis=0)
        return StageTimes(best, best, np.zeros(best.shape, dtype=int))

    def _merge(self, group: Group, role: Role, micro_batches: int) -> StageTimes:
        times = [self.stage(((unit, 1),), role, micro_batches) for unit in _units_of(group)]
        largest = times[0].step_ms.shape[1] - 1
        slots = np.concatenate([t.step_ms[:, 1:] for t in times], axis=1)
        alive = np.isfinite(slots).any(axis=1)  # layers that no node of the group holds stay out
        slots = slots[alive]
        if self.problem.phase is Phase.DECODE:
            merged = _expand(np.sort(slots, axis=1)[:, :largest], alive)
            return StageTimes(merged, merged, np.zeros(merged.shape, dtype=int))
        order = np.argsort(slots, axis=1, kind="stable")[:, :largest]
        latency = np.zeros(order.shape)
        least = np.full(order.shape, largest)
        rows = np.flatnonzero(alive)[:, None]
        for index, node in enumerate(times):
            share = np.cumsum(order // largest == index, axis=1)
            np.maximum(latency, node.latency_ms[rows, share], out=latency)
            at_work = np.where(share > 0, node.group_share[rows, share], largest)
            np.minimum(least, at_work, out=least)
        step = np.take_along_axis(slots, order, axis=1)
        share_of_all = np.zeros((alive.size, largest + 1), dtype=int)
        share_of_all[alive, 1:] = least
        return StageTimes(_expand(step, alive), _expand(latency, alive), share_of_all)


def hop_ms(problem: PhaseProblem, combination: Combination, batch: int) -> float:
    """Time between two stages: latency + tokens x bytes / the slowest network of the nodes."""
    terms = problem.terms
    slowest = min(problem.nodes[name].network_peak_gbit_per_s for name, _ in combination)
    tokens = batch * terms.hop_tokens + terms.hop_tokens_extra
    return terms.hop_latency_ms + tokens * terms.hop_bytes_per_token * 8.0 / (slowest * GBIT_PER_MS)


def network_ms(
    problem: PhaseProblem, node: NodeProfile, role: Role, layers: ArrayLike, batch: ArrayLike
) -> Floats:
    """Time in which a node moves what one micro-batch sends and receives, both ways at once.

    Activations come in from the stage before and go out to the one after. Prefill also sends the
    KV of its layers for every prompt; a decode micro-batch of x requests takes over x / o prompts
    per cycle. At the sustained bandwidth, since it never stops.
    """
    terms = problem.terms
    requests = np.asarray(batch, dtype=float)
    prompts = requests / terms.tokens_per_cycle
    kv = prompts * np.asarray(layers) * terms.prompt_kv_bytes_per_layer
    hop = requests * terms.hop_tokens * terms.hop_bytes_per_token
    received, sent = hop * role.receives, hop * role.sends
    if problem.phase is Phase.PREFILL:
        sent = sent + kv
    else:
        received = received + kv
    bits = 8.0 * np.maximum(received, sent)
    return np.asarray(bits / (node.network_baseline_gbit_per_s * GBIT_PER_MS))


def handover_ms(
    problem: PhaseProblem, node: NodeProfile, layers: ArrayLike, batch: ArrayLike
) -> Floats:
    """Time in which a node sends, or receives, its layers' KV of a p95 prompt.

    All prompts of a prefill micro-batch are done together, so the long one shares the network
    with the others; a decode node receives one prompt at a time.
    """
    terms = problem.terms
    kv = np.asarray(layers) * terms.p95_prompt_kv_bytes_per_layer
    if problem.phase is Phase.PREFILL:
        others = np.maximum(np.asarray(batch, dtype=float) - 1.0, 0.0)
        kv = kv + others * np.asarray(layers) * terms.prompt_kv_bytes_per_layer
    return np.asarray(8.0 * kv / (node.network_peak_gbit_per_s * GBIT_PER_MS))


def _node_times(
    problem: PhaseProblem, node: NodeProfile, option: NodeOption, role: Role, micro_batches: int
) -> StageTimes:
    terms = problem.terms
    layers = np.arange(terms.layers + 1)
    batches = np.arange(max(problem.batch_sizes) + 1)
    group = -(-batches // option.dp)  # the largest share of the node's groups
    index = np.maximum(group - 1, 0)
    head = option.head_ms[index] * role.is_last + option.overhead_ms
    step = layers[:, None] * option.layer_ms[index][None, :] + head[None, :]
    step = np.maximum(step, network_ms(problem, node, role, layers[:, None], batches[None, :]))
    latency = layers[:, None] * option.latency_layer_ms[index][None, :] + head[None, :]
    room = np.array(
        [
            option.max_sequences(int(n), first=role.is_first, last=role.is_last, terms=terms)
            if n
            else 0
            for n in layers
        ]
    )
    unfit = micro_batches * group[None, :] > room[:, None]  # P4; no layers, no room (P1)
    unfit |= handover_ms(problem, node, layers[:, None], batches[None, :]) > terms.handover_ms
    step[unfit] = latency[unfit] = np.inf
    step[:, 0] = latency[:, 0] = 0.0
    share = np.broadcast_to(batches // option.dp, step.shape)
    return StageTimes(step, step if problem.phase.in_cycles else latency, share)


def _units_of(group: Group) -> list[Unit]:
    return [unit for unit, count in group for _ in range(count)]


def _expand(times: Floats, alive: NDArray[np.bool_]) -> Floats:
    """Back to all layers (infinite where no node holds them) and to a batch of zero."""
    whole = np.full((alive.size, times.shape[1] + 1), np.inf)
    whole[:, 0] = 0.0
    whole[alive, 1:] = times
    return whole

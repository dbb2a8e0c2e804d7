"""Times of one stage: any group of nodes, any number of layers, any micro-batch size.

Every node of a stage has an option (8 x TP1, ..., 1 x TP8) and a share of the micro-batch, or is
idle; the shares add to it (docs/formulation.md, P3). With `t_i(x)` the least step of node i for x
requests, every node offers slots t_i(1) <= t_i(2) <= ..., and the best split of b takes the b
cheapest slots of all nodes. Prefill takes slots by latency, among those whose step is under the
cap; a least share per group makes the first slots of an option one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.perf.grids import Floats
from planner.placement.profile import NodeProfile, PhaseProblem
from planner.types import Combination, Phase, Stage, StageNode

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


BEST = -1  # any option
MOST_MERGED = 1024  # groups whose times are kept, of some hundred kilobytes each
Unit = tuple[str, int]  # a node of a class, and which of its options it has to take (or BEST)
Units = tuple[Unit, ...]  # the nodes of one stage


def units_of(part: Combination) -> Units:
    """The nodes of a combination, free in their options."""
    return tuple((name, BEST) for name, count in part for _ in range(count))


@dataclass(frozen=True)
class NodeTimes:
    """Times of one node in one option, shape (layers, largest batch + 1), by [l, x]."""

    step_ms: Floats  # infinite where memory or the KV hand-over does not fit
    latency_ms: Floats  # with one p95 request in the micro-batch; in cycles the same as step_ms


@dataclass
class StageTable:
    """Stage times of one phase problem, computed once for every group, role and M."""

    problem: PhaseProblem
    _times: dict[tuple[Unit, Role, int], NodeTimes] = field(default_factory=dict)
    _slots: dict[tuple[Unit, Role, int], Floats] = field(default_factory=dict)
    _merged: dict[tuple[Units, Role, int], Floats] = field(default_factory=dict)
    _work: dict[tuple[str, int, int], tuple[Floats, Floats]] = field(default_factory=dict)

    def latency_ms(
        self,
        units: Units,
        role: Role,
        micro_batches: int,
        batch: int,
        least_share: int = 0,
        cap_ms: float = np.inf,
    ) -> Floats:
        """Least latency of a stage of these nodes by layers, shape (L + 1,); in cycles its step.

        Infinite where the nodes do not hold it, or no split has a step under the cap.
        """
        if self.problem.phase is Phase.PREFILL:
            slots = [self._prompt_slots(u, role, micro_batches, batch, cap_ms) for u in units]
            return _smallest(np.concatenate(slots, axis=1), batch)
        if least_share:
            found = self._with_shares(units, role, micro_batches, batch, least_share)
        else:
            found = self._merge(units, role, micro_batches)[:, batch]
        return np.where(found <= cap_ms, found, np.inf)

    def steps_ms(
        self, combination: Combination, role: Role, batch: int, layers: int | None = None
    ) -> Floats:
        """Every step that a node can have in a stage, of so many layers or any."""
        rows = slice(1, None) if layers is None else slice(layers, layers + 1)
        found = [
            self.times((name, which), role, 1).step_ms[rows, 1 : batch + 1].ravel()
            for name, _ in combination
            for which in range(len(self.problem.nodes[name].options))
        ]
        steps = np.unique(np.concatenate(found))
        return steps[np.isfinite(steps)]

    def work(self, name: str, micro_batches: int, batch: int, cap_ms: float) -> float:
        """Most request-layers that one node does within `cap_ms` of a micro-batch of `batch`."""
        key = (name, micro_batches, batch)
        if key not in self._work:
            self._work[key] = self._work_frontier(name, micro_batches, batch)
        times, amounts = self._work[key]
        position = int(np.searchsorted(times, cap_ms, side="right")) - 1
        return float(amounts[position]) if position >= 0 else 0.0

    def times(self, unit: Unit, role: Role, micro_batches: int) -> NodeTimes:
        """All times of a node in one option."""
        key = (unit, role, micro_batches)
        if key not in self._times:
            layers = np.arange(self.problem.terms.layers + 1)
            self._times[key] = node_times(self.problem, unit, role, micro_batches, layers)
        return self._times[key]

    def _work_frontier(self, name: str, micro_batches: int, batch: int) -> tuple[Floats, Floats]:
        """Step times and the most layers x requests within each, both increasing."""
        step = self._best_slots((name, BEST), Role.NOWHERE, micro_batches)[:, : batch + 1]
        amount = np.outer(np.arange(step.shape[0]), np.arange(batch + 1)).astype(float)
        finite = np.isfinite(step) & (amount > 0)
        times, amounts = step[finite], amount[finite]
        order = np.lexsort((-amounts, times))
        times, amounts = times[order], amounts[order]
        rising = np.diff(np.maximum.accumulate(amounts), prepend=0.0) > 0
        return times[rising], amounts[rising]

    def _best_slots(self, unit: Unit, role: Role, micro_batches: int) -> Floats:
        """Least step of a node by [l, x], whatever its option."""
        key = (unit, role, micro_batches)
        if key not in self._slots:
            chosen = _choices(self.problem, unit)
            self._slots[key] = np.minimum.reduce(
                [self.times((unit[0], which), role, micro_batches).step_ms for which in chosen]
            )
        return self._slots[key]

    def _merge(self, units: Units, role: Role, micro_batches: int) -> Floats:
        """The b-th smallest slot of all nodes, by [l, b]."""
        key = (units, role, micro_batches)
        if key not in self._merged:
            if len(self._merged) >= MOST_MERGED:
                self._merged.clear()
            slots = [self._best_slots(unit, role, micro_batches)[:, 1:] for unit in units]
            largest = slots[0].shape[1]
            merged = np.sort(np.concatenate(slots, axis=1), axis=1)[:, :largest]
            self._merged[key] = np.hstack([np.zeros((merged.shape[0], 1)), merged])
        return self._merged[key]

    def _prompt_slots(
        self, unit: Unit, role: Role, micro_batches: int, batch: int, cap_ms: float
    ) -> Floats:
        """Least latency of a node by [l, x - 1] among options whose step is under the cap."""
        found = []
        for which in _choices(self.problem, unit):
            times = self.times((unit[0], which), role, micro_batches)
            step, latency = times.step_ms[:, 1 : batch + 1], times.latency_ms[:, 1 : batch + 1]
            found.append(np.where(step <= cap_ms, latency, np.inf))
        best: Floats = np.minimum.reduce(found)
        return best

    def _with_shares(
        self, units: Units, role: Role, micro_batches: int, batch: int, least_share: int
    ) -> Floats:
        """Least step where every tensor parallel group has `least_share` requests or none."""
        best = np.full(self.problem.terms.layers + 1, np.inf)
        for chosen in _at_work(self.problem, units):
            least = [least_share * _dp(self.problem, unit) for unit in chosen]
            left = batch - sum(least)
            if left < 0:
                continue
            steps = [self.times(unit, role, micro_batches).step_ms for unit in chosen]
            base = np.maximum.reduce([s[:, x] for s, x in zip(steps, least, strict=True)])
            if left:
                more = [s[:, x + 1 : batch + 1] for s, x in zip(steps, least, strict=True)]
                base = np.maximum(base, _smallest(np.concatenate(more, axis=1), left))
            np.minimum(best, base, out=best)
        return best


KnownTimes = dict[tuple[str, int, Role, int, int], NodeTimes]


def split_stage(
    problem: PhaseProblem,
    units: Units,
    role: Role,
    micro_batches: int,
    layers: int,
    batch: int,
    least_share: int = 0,
    cap_ms: float = np.inf,
    known: KnownTimes | None = None,
) -> tuple[StageNode, ...]:
    """The split that `StageTable.latency_ms` stands for, without idle nodes; () for none.

    `known` keeps node times from one call to the next.
    """
    prefill = problem.phase is Phase.PREFILL
    rows: dict[Unit, Floats] = {}
    for name, which in {(u[0], w) for u in units for w in _choices(problem, u)}:
        key = (name, which, role, micro_batches, layers)
        times = known.get(key) if known is not None else None
        if times is None:
            times = node_times(problem, (name, which), role, micro_batches, np.array([layers]))
            if known is not None:
                known[key] = times
        latency = times.latency_ms[0] if prefill else times.step_ms[0]
        rows[name, which] = np.where(times.step_ms[0] <= cap_ms, latency, np.inf)
    best: tuple[tuple[Unit, int], ...] = ()
    worst = np.inf
    for chosen in _at_work(problem, units) if least_share else [units]:
        split = _cheapest_slots(problem, chosen, rows, batch, least_share)
        if split is not None and split[0] < worst:
            worst, best = split[0], tuple(zip(chosen, split[1], strict=True))
    nodes = []
    for (name, which), share in best:
        if share:
            choices = _choices(problem, (name, which))
            fastest = min((float(rows[name, w][share]), w) for w in choices)[1]
            option = problem.nodes[name].options[fastest]
            nodes.append(StageNode(name, option.tp, option.dp, share))
    return tuple(nodes)


def split_pipeline(
    problem: PhaseProblem,
    parts: Sequence[tuple[Combination, int]],
    micro_batches: int,
    batch: int,
    least_share: int,
    cap_ms: float,
    known: KnownTimes | None = None,
) -> tuple[Stage, ...]:
    """Stages of a pipeline from the nodes and the number of layers of each, in order."""
    stages: list[Stage] = []
    first = 0
    for index, (part, layers) in enumerate(parts):
        role = Role.at(index, len(parts))
        nodes = split_stage(
            problem, units_of(part), role, micro_batches, layers, batch, least_share, cap_ms, known
        )
        stages.append(Stage(first, layers, nodes))
        first += layers
    return tuple(stages)


def _cheapest_slots(
    problem: PhaseProblem,
    units: Units,
    rows: Mapping[Unit, Floats],
    batch: int,
    least_share: int,
) -> tuple[float, list[int]] | None:
    """Slowest node and shares of the best split; `least_share` requests a group go first."""
    least = [least_share * _dp(problem, unit) if least_share else 0 for unit in units]
    left = batch - sum(least)
    if left < 0:
        return None
    worst = 0.0
    slots = np.full((len(units), batch), np.inf)
    for index, (unit, start) in enumerate(zip(units, least, strict=True)):
        times = np.minimum.reduce([rows[unit[0], w] for w in _choices(problem, unit)])
        worst = max(worst, float(times[start]))
        slots[index, : batch - start] = times[start + 1 : batch + 1]
    taken = np.argsort(slots, axis=None, kind="stable")[:left]
    worst = max(worst, float(slots.ravel()[taken].max(initial=0.0)))
    counts = np.bincount(taken // batch, minlength=len(units)).tolist()
    return worst, [count + start for count, start in zip(counts, least, strict=True)]


def node_times(
    problem: PhaseProblem,
    unit: Unit,
    role: Role,
    micro_batches: int,
    layers: NDArray[np.int_],
) -> NodeTimes:
    """Times of a node in one option for some numbers of layers and every batch."""
    terms, node = problem.terms, problem.nodes[unit[0]]
    option = node.options[unit[1]]
    batches = np.arange(max(problem.batch_sizes) + 1)
    group = -(-batches // option.dp)  # the largest share of the node's groups
    index = np.maximum(group - 1, 0)
    head = option.head_ms[index] * role.is_last + option.overhead_ms
    with np.errstate(invalid="ignore"):  # no layers of infinite time: set to zero below
        step = layers[:, None] * option.layer_ms[index][None, :] + head[None, :]
        latency = layers[:, None] * option.latency_layer_ms[index][None, :] + head[None, :]
    step = np.maximum(step, network_ms(problem, node, role, layers[:, None], batches[None, :]))
    room = option.most_sequences(layers, first=role.is_first, last=role.is_last, terms=terms)
    unfit = micro_batches * group[None, :] > room[:, None]  # P4; no layers, no room (P1)
    unfit |= handover_ms(problem, node, layers[:, None], batches[None, :]) > terms.handover_ms
    step[unfit] = latency[unfit] = np.inf
    step[:, 0] = latency[:, 0] = 0.0
    return NodeTimes(step, step if problem.phase.in_cycles else latency)


def hop_ms(problem: PhaseProblem, combination: Combination, batch: float) -> float:
    """Time between two stages: latency, and bytes over the transport and the slowest network."""
    terms = problem.terms
    slowest = min(problem.nodes[name].network_peak_gbit_per_s for name, _ in combination)
    tokens = batch * terms.hop_tokens + terms.hop_tokens_extra
    moved = tokens * terms.hop_bytes_per_token
    own = terms.hop_latency_ms + moved * terms.hop_ms_per_byte
    return own + moved * 8.0 / (slowest * GBIT_PER_MS)


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


def _choices(problem: PhaseProblem, unit: Unit) -> Sequence[int]:
    """Options that a node may take."""
    return range(len(problem.nodes[unit[0]].options)) if unit[1] == BEST else (unit[1],)


def _at_work(problem: PhaseProblem, units: Units) -> Iterator[Units]:
    """Every choice of nodes at work and of their options; equal choices once."""
    seen: set[Units] = set()
    for chosen in product(*((None, *_choices(problem, u)) for u in units)):
        at_work = [(u[0], w) for u, w in zip(units, chosen, strict=True) if w is not None]
        key = tuple(sorted(at_work))
        if key and key not in seen:
            seen.add(key)
            yield key


def _dp(problem: PhaseProblem, unit: Unit) -> int:
    return problem.nodes[unit[0]].options[unit[1]].dp


def _smallest(slots: Floats, rank: int) -> Floats:
    """The rank-th smallest of every row; infinite where there are fewer."""
    if slots.shape[1] < rank:
        return np.full(slots.shape[0], np.inf)
    return np.partition(slots, rank - 1, axis=1)[:, rank - 1]

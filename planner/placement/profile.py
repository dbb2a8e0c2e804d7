"""Step times and memory of each node class for one phase of a workload, as arrays.

These numbers are all that a placement depends on, so their hash is its cache key: a changed
profile, price-free, invalidates exactly the combinations that used it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.perf.grids import Floats
from planner.perf.model import PerformanceModel
from planner.placement.settings import RELATIVE_TOLERANCE, PlacementSettings
from planner.types import Combination, Link, NodeClass, Phase, Provenance, Workload

GIB = 2.0**30
FORMULATION_VERSION = 3  # raise it whenever the same numbers would give another placement


def prefill_micro_batches(nodes: int) -> int:
    """M of prefill on so many nodes: enough for unequal prompts not to starve a stage.

    One per stage and one per hop would do for equal ones (docs/formulation.md, P5).
    """
    return max(1, 8 * (nodes - 1))


@dataclass(frozen=True)
class NodeOption:
    """One way to use a node: `dp` groups of `tp` GPUs each; arrays are indexed by batch - 1."""

    tp: int
    dp: int
    layer_ms: Floats  # one layer, for throughput
    head_ms: Floats
    latency_layer_ms: Floats  # the same with one request of p95 length in the batch
    overhead_ms: float
    free_bytes: float  # of one GPU, before weights
    layer_bytes: float  # weights of one layer on one GPU
    embed_bytes: float
    lm_head_bytes: float
    kv_bytes: float  # of one token and layer on one GPU
    provenance: Provenance

    def most_sequences(
        self, layers: NDArray[np.int64], *, first: bool, last: bool, terms: RequestTerms
    ) -> NDArray[np.int64]:
        """Requests in flight that one group holds beside the weights of `layers` layers (P4).

        None without layers, which is a node that is not used (P1).
        """
        room = self.kv_room_bytes(layers, first=first, last=last)
        tokens = room / (np.maximum(layers, 1) * self.kv_bytes)
        held = (tokens - terms.kv_tokens_extra) // terms.kv_tokens
        return np.where((layers > 0) & (tokens > 0), held, 0).astype(np.int64)

    def kv_room_bytes(self, layers: ArrayLike, *, first: bool, last: bool) -> Floats:
        """What the weights of `layers` layers leave of one GPU for KV."""
        ends = self.embed_bytes * first + self.lm_head_bytes * last
        return self.free_bytes - (np.asarray(layers, dtype=float) * self.layer_bytes + ends)


@dataclass(frozen=True)
class NodeProfile:
    """All ways to use one node class."""

    name: str
    memory_gib: float
    network_peak_gbit_per_s: float
    network_baseline_gbit_per_s: float
    options: tuple[NodeOption, ...]


@dataclass(frozen=True)
class RequestTerms:
    """Numbers of the workload that a placement needs."""

    phase: Phase
    layers: int
    budget_ms: float  # right-hand side of P5
    handover_ms: float  # longest time to move one stage's KV of a p95 prompt
    tokens_per_cycle: float  # steps per request: mean output (decode) or 1 (prefill)
    kv_tokens: float  # KV that one more request holds
    kv_tokens_extra: float  # more, once, for the one request of p95 length
    prompt_kv_bytes_per_layer: float  # of a mean prompt, all GPUs together
    p95_prompt_kv_bytes_per_layer: float
    hop_tokens: float  # per request of a micro-batch
    hop_tokens_extra: float
    hop_bytes_per_token: float
    hop_latency_ms: float
    model_bytes: float
    utilization: float
    chunk_tokens: float = 0.0  # aggregated: new prompt tokens per decode of a step, p / o
    p95_input: float = 0.0
    chunks_budget_ms: float = math.inf  # aggregated: for all chunks of a p95 prompt
    hop_ms_per_byte: float = 0.0  # of the transport, beside the network's own

    def chunks_of_p95_prompt(self, share: int) -> float:
        """Chunks of a p95 prompt in a group that takes `share` requests of a micro-batch.

        A step carries chunk_tokens new tokens per decode, so such a group works off a prompt in
        chunks of share x chunk_tokens, one per cycle.
        """
        if self.chunk_tokens == 0.0:
            return 0.0
        return math.ceil(self.p95_input / (share * self.chunk_tokens)) if share else math.inf

    def longest_cycle_ms(self, share: int) -> float:
        """Right-hand side of P5 for phases in cycles; inf for prefill, whose budget is a sum."""
        chunks = self.chunks_of_p95_prompt(share)
        return min(self.budget_ms, self.chunks_budget_ms / chunks) if chunks else self.budget_ms


@dataclass(frozen=True)
class PhaseProblem:
    """One phase of one workload: what every combination's placement is solved from."""

    workload: str
    terms: RequestTerms
    batch_sizes: tuple[int, ...]
    nodes: Mapping[str, NodeProfile]
    least_gain: float = RELATIVE_TOLERANCE  # relative, of a template above its parts
    solver: str = "exact"  # results of the reference, which may be unproven, are kept apart

    @property
    def phase(self) -> Phase:
        return self.terms.phase

    def key(self, combination: Combination) -> str:
        """Content hash of everything that the combination's result depends on."""
        numbers = [self.names.index(name) for name, count in combination for _ in range(count)]
        return self.keys(np.array([numbers], dtype=np.uint8))[0]

    def keys(self, members: NDArray[np.uint8]) -> list[str]:
        """Content hashes of many combinations, class numbers of shape (n, nodes).

        The 128-bit sum of one hash for the terms and one for every node: a multiset hash, so the
        order and number of the other classes do not matter.
        """
        parts = np.array([_lanes(self._digests[name]) for name in self.names])
        terms = np.array(_lanes(self.terms_digest))
        with np.errstate(over="ignore"):
            sums = terms + parts[members].sum(axis=1, dtype=np.uint64)
        text = sums.astype(">u8").tobytes().hex()
        return [text[start : start + 32] for start in range(0, len(text), 32)]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Node classes in the order of their numbers."""
        return tuple(sorted(self.nodes))

    @cached_property
    def terms_digest(self) -> str:
        """Content hash of everything but the nodes."""
        terms = asdict(self.terms)
        if not self.terms.hop_ms_per_byte:  # as before there was one: libraries stay
            del terms["hop_ms_per_byte"]
        parts = [FORMULATION_VERSION, self.workload, terms, self.batch_sizes]
        text = json.dumps([*parts, self.least_gain, self.solver], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def _digests(self) -> dict[str, str]:
        return {name: _digest(profile) for name, profile in self.nodes.items()}


def _lanes(digest: str) -> tuple[np.uint64, np.uint64]:
    return np.uint64(int(digest[:16], 16)), np.uint64(int(digest[16:32], 16))


def build_phase_problem(
    workload: Workload,
    phase: Phase,
    nodes: Sequence[NodeClass],
    performance: PerformanceModel,
    settings: PlacementSettings,
) -> PhaseProblem:
    """Evaluate the performance model once for every node class and way of using it.

    Raises MissingProfileError: a node class has neither a measured table nor a roofline.
    """
    terms = _request_terms(workload, phase, settings)
    sizes = settings.batch_sizes(phase)
    if phase is Phase.PREFILL:
        lengths = workload.lengths
        room = (settings.max_batched_tokens - lengths.p95_input) / lengths.mean_input
        sizes = tuple(b for b in sizes if b <= room + 1.0) or (min(sizes),)
    profiles = {
        node.name: NodeProfile(
            name=node.name,
            memory_gib=node.memory_gib,
            network_peak_gbit_per_s=node.network_peak_gbit_per_s,
            network_baseline_gbit_per_s=node.network_baseline_gbit_per_s,
            options=tuple(
                _node_option(workload, phase, node, tp, max(sizes), performance, settings)
                for tp in _tensor_parallel_sizes(node, workload, settings)
            ),
        )
        for node in nodes
    }
    return PhaseProblem(workload.name, terms, sizes, profiles, settings.least_gain, settings.solver)


def _request_terms(workload: Workload, phase: Phase, settings: PlacementSettings) -> RequestTerms:
    model, lengths = workload.model, workload.lengths
    holds_output = phase.in_cycles
    moves_kv = phase is not Phase.AGGREGATED
    chunk_tokens = 0.0
    if phase is Phase.AGGREGATED:  # in steady state as many prompts come in as requests end
        chunk_tokens = lengths.mean_input / lengths.mean_output
    # A decode request holds its prompt and, reserved in full, its output.
    mean = lengths.mean_input + (lengths.mean_output if holds_output else 0.0)
    p95 = lengths.p95_input + (lengths.p95_output if holds_output else 0.0)
    kv_bytes = model.kv_bytes_per_token_per_layer if moves_kv else 0.0
    return RequestTerms(
        phase=phase,
        layers=model.layers,
        budget_ms=settings.latency_budget_ms(phase, workload.slo),
        handover_ms=settings.kv_handover_ms(workload.slo) if moves_kv else math.inf,
        tokens_per_cycle=lengths.mean_output if holds_output else 1.0,
        kv_tokens=mean,
        kv_tokens_extra=p95 - mean,
        prompt_kv_bytes_per_layer=kv_bytes * lengths.mean_input,
        p95_prompt_kv_bytes_per_layer=kv_bytes * lengths.p95_input,
        hop_tokens=1.0 + chunk_tokens if holds_output else lengths.mean_input,
        hop_tokens_extra=0.0 if holds_output else lengths.p95_input - lengths.mean_input,
        hop_bytes_per_token=model.hop_bytes_per_token,
        hop_latency_ms=settings.hop_latency_ms,
        hop_ms_per_byte=settings.hop_ms_per_byte,
        model_bytes=model.total_bytes,
        utilization=settings.utilization[phase],
        chunk_tokens=chunk_tokens,
        p95_input=lengths.p95_input,
        chunks_budget_ms=settings.chunks_budget_ms(workload.slo)
        if phase is Phase.AGGREGATED
        else math.inf,
    )


def _tensor_parallel_sizes(
    node: NodeClass, workload: Workload, settings: PlacementSettings
) -> list[int]:
    """Powers of two that divide the node's GPUs and the model's attention heads; 1 without a link.

    With `node_options: whole` the largest alone. A key covers a node's options, so libraries of
    both kinds share what no node of several GPUs is in.
    """
    linked = node.gpu_count if node.link is not Link.NONE else 1
    sizes = [2**k for k in range(linked.bit_length())]
    found = [t for t in sizes if node.gpu_count % t == 0 and workload.model.heads % t == 0]
    return found if settings.node_options == "all" else found[-1:]


def _node_option(
    workload: Workload,
    phase: Phase,
    node: NodeClass,
    tp: int,
    largest_batch: int,
    performance: PerformanceModel,
    settings: PlacementSettings,
) -> NodeOption:
    model, dtype, lengths = workload.model, workload.dtype, workload.lengths
    batch = np.arange(1.0, largest_batch + 1.0)
    if phase.in_cycles:
        # One request of p95 length among batch - 1 of mean length: the step that it sees.
        mean = lengths.mean_input + lengths.mean_output / 2.0
        long = lengths.p95_input + lengths.p95_output / 2.0
        context = mean + (long - mean) / batch
        if phase is Phase.DECODE:
            step = performance.decode_step(model, dtype, node, tp, batch, context)
        else:
            chunk = batch * lengths.mean_input / lengths.mean_output
            step = performance.mixed_step(
                model, dtype, node, tp, batch, context, chunk, lengths.p95_input
            )
        # A larger batch dilutes the long request, and interpolation could then fall.
        layer = latency = np.maximum.accumulate(step.layer_ms)
        head = step.head_ms
    else:
        step = performance.prefill_step(model, dtype, node, tp, batch, lengths.mean_input)
        tail = performance.prefill_step(
            model, dtype, node, tp, batch, lengths.mean_input, lengths.p95_input
        )
        layer, latency, head = step.layer_ms, tail.layer_ms, step.head_ms
    gpu = node.gpu
    return NodeOption(
        tp=tp,
        dp=node.gpu_count // tp,
        layer_ms=layer,
        head_ms=head,
        latency_layer_ms=latency,
        overhead_ms=performance.overhead_ms(gpu, model.name),
        free_bytes=GIB * (gpu.memory_gib * settings.memory_utilization)
        - GIB * settings.reserve_gib_per_gpu,
        layer_bytes=model.bytes_per_layer / tp,
        embed_bytes=model.embed_bytes / tp,
        lm_head_bytes=model.lm_head_bytes / tp,
        kv_bytes=model.kv_bytes_per_token_per_layer / model.kv_shards(tp),
        provenance=performance.provenance(model, dtype, node, tp),
    )


def _digest(profile: NodeProfile) -> str:
    digest = hashlib.sha256(
        f"{profile.name}|{profile.network_peak_gbit_per_s}|"
        f"{profile.network_baseline_gbit_per_s}".encode()
    )
    for option in profile.options:
        numbers = [option.tp, option.dp, option.overhead_ms, option.free_bytes, option.layer_bytes]
        numbers += [option.embed_bytes, option.lm_head_bytes, option.kv_bytes]
        digest.update(repr(numbers).encode())
        for array in (option.layer_ms, option.head_ms, option.latency_layer_ms):
            digest.update(np.round(array, 9).tobytes())
    return digest.hexdigest()

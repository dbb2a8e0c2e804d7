"""What the placement assumes of engine, memory and latency budget; all from the scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from planner.types import Phase, Slo

RELATIVE_TOLERANCE = 1e-4  # of a throughput: how near to the optimum a solver stops
SHARE_WIDTHS = (1, 2, 4, 8)  # aggregated: data-parallel groups that a pair (M, b) allows for


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """Caps and assumptions that hold for every template of a scenario."""

    max_nodes: int = 3  # N_max
    memory_ratio: float = 12.0  # rho: a combination's memory is at most rho x the model's bytes
    least_gain: float = RELATIVE_TOLERANCE  # relative, of a template above its parts
    solver: Literal["exact", "ilp"] = "exact"
    node_options: Literal["all", "whole"] = "all"  # whole: the widest tensor parallel group alone
    decode_batch_sizes: tuple[int, ...] = (
        1,
        2,
        4,
        8,
        16,
        24,
        32,
        48,
        64,
        96,
        128,
        192,
        256,
        384,
        512,
    )
    prefill_batch_sizes: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    memory_utilization: float = 0.90  # of the card, as vLLM's gpu_memory_utilization
    reserve_gib_per_gpu: float = 1.5  # activations, CUDA graphs, NCCL buffers
    max_batched_tokens: int = 8192  # new tokens in one prefill step
    hop_latency_ms: float = 0.2  # between two stages, before the bytes
    hop_ms_per_byte: float = 0.0  # of the transport, beside the network's own
    hop_measured: bool = False
    aggregated_batch_sizes: tuple[int, ...] = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    ttft_queue_share: float = 0.20  # of the TTFT objective, kept for queueing
    kv_handover_share: float = 0.30  # of the TTFT objective, kept for moving the prompt's KV
    caps: Literal["calibrated", "assumed"] = "calibrated"  # where there are calibrated ones
    corrections: Literal["observed", "none"] = "observed"  # what serving taught of templates
    utilization: Mapping[Phase, float] = field(
        default_factory=lambda: {
            Phase.PREFILL: 0.70,
            Phase.DECODE: 0.90,
            Phase.AGGREGATED: 0.80,
        }
    )

    def batch_sizes(self, phase: Phase) -> tuple[int, ...]:
        """Micro-batch sizes that the search tries."""
        match phase:
            case Phase.PREFILL:
                return self.prefill_batch_sizes
            case Phase.DECODE:
                return self.decode_batch_sizes
            case Phase.AGGREGATED:
                return self.aggregated_batch_sizes

    def kv_handover_ms(self, slo: Slo) -> float:
        """Longest time in which a node may send or receive its layers' KV of a p95 prompt."""
        return self.kv_handover_share * slo.ttft_ms

    def chunks_budget_ms(self, slo: Slo) -> float:
        """Aggregated: what queueing leaves of the TTFT for a p95 prompt's chunks."""
        return slo.ttft_ms * (1.0 - self.ttft_queue_share)

    def latency_budget_ms(self, phase: Phase, slo: Slo) -> float:
        """Right-hand side of P5.

        Decode and aggregated: the TPOT objective. Prefill: what queueing, the hand-over of the KV
        and the first decode step (one TPOT) leave of the TTFT objective.
        """
        if phase.in_cycles:
            return slo.tpot_ms
        spared = self.ttft_queue_share + self.kv_handover_share
        return slo.ttft_ms * (1.0 - spared) - slo.tpot_ms

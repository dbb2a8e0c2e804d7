"""Calibrated roofline of one transformer layer, form `op_max` of the seed's calibration.csv.

    t = sum over ops of max(FLOPs / (e_c x peak), bytes / (e_b x bandwidth)) + overhead

Ops: QKV, output, gate+up and down GEMMs (or router and experts), attention, element-wise work.
A GEMM of M x K by K x N has 2MNK FLOPs and wKN + 2(MK + MN) bytes. Communication is separate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.perf.grids import Floats
from planner.types import GpuSpec, ModelSpec, Provenance

HALF_BYTES = 2.0
LOW_POWER_W = 100.0  # cards below it clock down under load: a class of their own


@dataclass(frozen=True, slots=True)
class Calibration:
    """Efficiencies of one GPU for one kind of layer."""

    compute_efficiency: float
    bandwidth_efficiency: float
    fixed_overhead_us: float
    provenance: Provenance
    source: str


# Class defaults of the seed's calibration.csv (rows '*' and '*low-power'), fitted on nothing.
DEFAULT_DENSE = Calibration(0.70, 0.80, 40.0, Provenance.ESTIMATED, "class default, dense")
DEFAULT_LOW_POWER = Calibration(0.42, 0.80, 40.0, Provenance.ESTIMATED, "class default, low power")
DEFAULT_MOE = Calibration(0.40, 0.80, 55.0, Provenance.ESTIMATED, "class default, MoE")


def default_calibration(model: ModelSpec, gpu: GpuSpec) -> Calibration:
    """What to use for a GPU that nobody has measured."""
    if model.is_moe:
        return DEFAULT_MOE
    return DEFAULT_LOW_POWER if gpu.power_w < LOW_POWER_W else DEFAULT_DENSE


@dataclass(frozen=True, slots=True)
class Roofline:
    """Milliseconds of one layer and of the head on one GPU of a tensor parallel group."""

    model: ModelSpec
    gpu: GpuSpec
    tensor_parallel_size: int
    calibration: Calibration

    def decode_layer_ms(self, batch: Floats, context: Floats) -> Floats:
        """`batch` sequences with one new token each over `context` cached tokens each."""
        return self.mixed_linear_ms(batch) + self.decode_attention_ms(batch, context)

    def decode_attention_ms(self, batch: Floats, context: Floats) -> Floats:
        """Attention of a decode step alone."""
        heads = self.model.heads / self.tensor_parallel_size
        flops = 4.0 * heads * self.model.head_dim * context * batch
        return self._op_ms(flops, self._qo_bytes(batch) + self._kv_bytes(batch * context))

    def mixed_linear_ms(self, tokens: Floats) -> Floats:
        """Everything of a layer but attention, for `tokens` tokens of any kind."""
        return self._fixed_ms() + self._linear_ms(tokens)

    def prefill_linear_ms(self, tokens: Floats) -> Floats:
        """Everything of a prefill layer but its attention, for `tokens` new tokens."""
        return self.mixed_linear_ms(tokens)

    def prefill_attention_ms(self, tokens: Floats, context: Floats) -> Floats:
        """Causal attention of one sequence of `tokens` new tokens over `context` cached ones."""
        heads = self.model.heads / self.tensor_parallel_size
        flops = 4.0 * heads * self.model.head_dim * (tokens * context + tokens**2 / 2.0)
        return self._op_ms(flops, self._qo_bytes(tokens) + self._kv_bytes(tokens + context))

    def head_ms(self, rows: Floats) -> Floats:
        """Logits of `rows` tokens."""
        out = self.model.vocab / self.tensor_parallel_size
        return self._gemm_ms(rows, self.model.hidden, out, self.model.weight_bytes)

    def _linear_ms(self, tokens: Floats) -> Floats:
        model, tp = self.model, self.tensor_parallel_size
        heads, kv_heads = model.heads / tp, max(model.kv_heads / tp, 1.0)
        width = model.head_dim
        time = self._gemm_ms(
            tokens, model.hidden, (heads + 2 * kv_heads) * width, model.weight_bytes
        )
        time = time + self._gemm_ms(tokens, heads * width, model.hidden, model.weight_bytes)
        if model.is_moe:
            inner = model.moe_intermediate * model.experts_per_token
            time = time + self._gemm_ms(tokens, model.hidden, model.experts, model.weight_bytes)
            time = time + self._experts_ms(tokens)
        else:
            inner = model.intermediate
            time = time + self._gemm_ms(tokens, model.hidden, 2 * inner / tp, model.weight_bytes)
            time = time + self._gemm_ms(tokens, inner / tp, model.hidden, model.weight_bytes)
        elementwise = 16.0 * model.hidden + 6.0 * inner / tp + 4.0 * (heads + 2 * kv_heads) * width
        return time + self._op_ms(0.0 * tokens, elementwise * tokens)

    def _experts_ms(self, tokens: Floats) -> Floats:
        model, tp = self.model, self.tensor_parallel_size
        share = model.experts_per_token / model.experts
        touched = model.experts * (1.0 - (1.0 - share) ** tokens)
        expert_parameters = 3.0 * model.hidden * model.moe_intermediate / tp
        routed = tokens * model.experts_per_token
        weights = touched * expert_parameters * model.expert_weight_bytes
        activations = HALF_BYTES * routed * (2.0 * model.hidden + 3.0 * model.moe_intermediate / tp)
        return self._op_ms(2.0 * routed * expert_parameters, weights + activations)

    def _gemm_ms(self, m: Floats, k: float, n: float, weight_bytes: float) -> Floats:
        traffic = weight_bytes * k * n + HALF_BYTES * m * (k + n)
        return self._op_ms(2.0 * m * k * n, traffic)

    def _op_ms(self, flops: Floats, traffic_bytes: Floats) -> Floats:
        peak_flops_per_ms = self.gpu.half_tflops * 1e9
        bytes_per_ms = self.gpu.memory_bandwidth_gbyte_per_s * 1e6
        return np.maximum(
            flops / (self.calibration.compute_efficiency * peak_flops_per_ms),
            traffic_bytes / (self.calibration.bandwidth_efficiency * bytes_per_ms),
        )

    def _qo_bytes(self, tokens: Floats) -> Floats:
        heads = self.model.heads / self.tensor_parallel_size
        return 2.0 * HALF_BYTES * heads * self.model.head_dim * tokens

    def _kv_bytes(self, tokens: Floats) -> Floats:
        shards = self.model.kv_shards(self.tensor_parallel_size)
        return self.model.kv_bytes_per_token_per_layer / shards * tokens

    def _fixed_ms(self) -> float:
        return self.calibration.fixed_overhead_us / 1e3

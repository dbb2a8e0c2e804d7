"""The performance model: measured tables first, calibrated roofline where nothing is measured.

Source: docs/formulation.md, section 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from planner.errors import MissingProfileError
from planner.perf.allreduce import AllReduce
from planner.perf.grids import Floats
from planner.perf.roofline import HALF_BYTES, Calibration, Roofline, default_calibration
from planner.perf.tables import LayerRow, LayerTable, TableKey
from planner.types import GpuSpec, ModelSpec, NodeClass, Provenance

ALL_REDUCES_PER_LAYER = 2  # after attention and after the MLP (Megatron tensor parallelism)
# Which calibrations stand for a dtype, best first. Expert weights in mxfp4 are 4-bit bytes and
# 16-bit arithmetic on every card before Blackwell.
ROOFLINE_DTYPES = {"bf16": ("bf16", "fp16"), "fp16": ("fp16", "bf16"), "mxfp4": ("bf16", "fp16")}


class LayerTimes(Protocol):
    """What both a measured table and a roofline answer, in ms, without communication."""

    def decode_layer_ms(self, batch: Floats, context: Floats) -> Floats: ...
    def decode_attention_ms(self, batch: Floats, context: Floats) -> Floats: ...
    def mixed_linear_ms(self, tokens: Floats) -> Floats: ...
    def prefill_linear_ms(self, tokens: Floats) -> Floats: ...
    def prefill_attention_ms(self, tokens: Floats, context: Floats) -> Floats: ...
    def head_ms(self, rows: Floats) -> Floats: ...


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of one layer (all-reduce included) and of the head, for several batches."""

    layer_ms: Floats
    head_ms: Floats


@dataclass(frozen=True)
class PerformanceModel:
    """Answers step times of (model, dtype) on a node class; every answer has a provenance."""

    rows: Mapping[TableKey, list[LayerRow]]
    calibrations: Mapping[tuple[str, str, str], Calibration]  # (profile name, scope, dtype)
    all_reduce: AllReduce
    engine_overhead_ms: Mapping[str, float]  # by GPU family; absent where never fitted
    # By (GPU family, model name), of models with measured runs enough of their own.
    model_overhead_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    _tables: dict[TableKey, LayerTable] = field(default_factory=dict, repr=False)

    def decode_step(
        self, model: ModelSpec, dtype: str, node: NodeClass, tp: int, batch: Floats, context: Floats
    ) -> StepTimes:
        """One decode step of `batch` sequences over `context` cached tokens each."""
        times = self.layer_times(model, dtype, node.gpu, tp)
        layer = times.decode_layer_ms(batch, context) + self.comm_ms(model, node, tp, batch)
        return StepTimes(layer, times.head_ms(batch))

    def prefill_step(
        self,
        model: ModelSpec,
        dtype: str,
        node: NodeClass,
        tp: int,
        prompts: Floats,
        mean_tokens: float,
        one_of_tokens: float | None = None,
    ) -> StepTimes:
        """One step over `prompts` whole prompts of `mean_tokens` each.

        With `one_of_tokens`, one prompt of the batch has that many tokens instead.
        """
        times = self.layer_times(model, dtype, node.gpu, tp)
        special = mean_tokens if one_of_tokens is None else one_of_tokens
        tokens = (prompts - 1.0) * mean_tokens + special
        zero = np.zeros(prompts.shape)
        attention = (prompts - 1.0) * times.prefill_attention_ms(zero + mean_tokens, zero)
        attention = attention + times.prefill_attention_ms(zero + special, zero)
        layer = times.prefill_linear_ms(tokens) + attention
        layer = layer + self.comm_ms(model, node, tp, tokens)
        return StepTimes(layer, times.head_ms(prompts))

    def mixed_step(
        self,
        model: ModelSpec,
        dtype: str,
        node: NodeClass,
        tp: int,
        batch: Floats,
        context: Floats,
        prefill_tokens: Floats,
        prompt_tokens: float,
    ) -> StepTimes:
        """One step of `batch` decodes and `prefill_tokens` new tokens of longer prompts.

        Those tokens carry their share of the attention of a whole prompt of `prompt_tokens`.
        """
        times = self.layer_times(model, dtype, node.gpu, tp)
        zero = np.zeros(batch.shape)
        tokens = batch + prefill_tokens
        prompt = times.prefill_attention_ms(zero + prompt_tokens, zero)
        layer = times.mixed_linear_ms(tokens) + times.decode_attention_ms(batch, context)
        layer = layer + prefill_tokens / prompt_tokens * prompt
        layer = layer + self.comm_ms(model, node, tp, tokens)
        return StepTimes(layer, times.head_ms(batch + prefill_tokens / prompt_tokens))

    def overhead_ms(self, gpu: GpuSpec, model: str = "") -> float:
        """Engine overhead per step, the model's own where it has one, else the GPU family's.

        0 where neither was fitted (see provenance).
        """
        family = family_of(gpu)
        shared = self.engine_overhead_ms.get(family, 0.0)
        return self.model_overhead_ms.get((family, model), shared)

    def provenance(self, model: ModelSpec, dtype: str, node: NodeClass, tp: int) -> Provenance:
        """The worst source among layer times, all-reduce and engine overhead."""
        times = self.layer_times(model, dtype, node.gpu, tp)
        layer = times.provenance if isinstance(times, LayerTable) else times.calibration.provenance
        fitted = family_of(node.gpu) in self.engine_overhead_ms
        engine = Provenance.MEASURED if fitted else Provenance.CALIBRATED
        return Provenance.worst(layer, engine, self.all_reduce.provenance(node, tp))

    def source(self, model: ModelSpec, dtype: str, node: NodeClass, tp: int) -> str:
        """Where the layer times come from, in words."""
        times = self.layer_times(model, dtype, node.gpu, tp)
        if isinstance(times, LayerTable):
            return times.source
        return f"roofline op_max ({times.calibration.source})"

    def comm_ms(self, model: ModelSpec, node: NodeClass, tp: int, tokens: Floats) -> Floats:
        """All-reduces of one layer over `tokens` new tokens, in ms."""
        message = HALF_BYTES * model.hidden * tokens
        return ALL_REDUCES_PER_LAYER * self.all_reduce.ms(node, tp, message)

    def layer_times(
        self, model: ModelSpec, dtype: str, gpu: GpuSpec, tp: int
    ) -> LayerTable | Roofline:
        """The table or roofline that answers for a tensor parallel group.

        Raises MissingProfileError: there is neither.
        """
        key = (model.name, dtype, gpu.profile_name, tp)
        if key in self.rows:
            if key not in self._tables:
                name = f"{model.name} {dtype} on {gpu.name} TP{tp}"
                self._tables[key] = LayerTable.of(name, self.rows[key])
            return self._tables[key]
        if dtype not in ROOFLINE_DTYPES:
            raise MissingProfileError(
                f"no measured profile of {model.name} in {dtype} on {gpu.name} at tensor parallel "
                f"size {tp}, and the roofline knows only bf16, fp16 and mxfp4; leave {gpu.name} "
                "out of node_classes, or import a profile of it"
            )
        scope = "moe" if model.is_moe else "dense"
        for table_dtype in ROOFLINE_DTYPES[dtype]:
            found = self.calibrations.get((gpu.profile_name, scope, table_dtype))
            if found is not None:
                if dtype == "mxfp4":  # nobody calibrated it
                    found = replace(found, provenance=Provenance.ESTIMATED)
                return Roofline(model, gpu, tp, found)
        return Roofline(model, gpu, tp, default_calibration(model, gpu))


def family_of(gpu: GpuSpec) -> str:
    """GPU family, by compute capability: '9.0' is Hopper."""
    return f"{gpu.compute_capability:.1f}"

"""Layer tables out of aiconfigurator-core, NVIDIA's collection of measured operators.

Its operators were timed alone, in CUDA graphs, on many GPU types; here they are added up to a layer
of one model as `catalog/seed/layer_profiles.parquet` was made: GEMMs, attention, experts and
element-wise work, all-reduces apart. So a GPU type can be planned with before one is rented, and
the first profile of one's own replaces it. Needs the extra `coral-serving[aiconfigurator]`, of
the 0.12 series: its queries are not a public interface.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from planner.errors import InputError
from planner.perf.repair import repair
from planner.perf.tables import LayerRow
from planner.types import GpuSpec, ModelSpec
from tasks.profile_tables import Profile

SERIES = "0.12."
PREFIX = "aiconfigurator:"
SIZES = (1, 2, 4, 8)
DECODE = ((1, 2, 4, 8, 16, 32, 64, 128, 256), (512, 2048, 8192, 32768))  # batches, contexts
PREFILL = ((128, 256, 512, 1024, 2048, 4096, 8192), (0, 2048, 8192))  # tokens, contexts
MESSAGES = tuple(2**power for power in range(12, 29, 2))  # bytes
REDUCED_HIDDEN = 2048  # any: an all-reduce goes by its bytes
NORM_SHARE = 0.8  # of the bandwidth that element-wise work reaches
EMBEDDING_SHARE = 0.3
SKEW = "power_law_1.2"  # of tokens over experts
QK_NORM = ("Qwen/Qwen3",)  # models that norm queries and keys


class AiconfiguratorError(InputError):
    """aiconfigurator-core is not there, is of another series, or lacks what was asked for."""


@dataclass(frozen=True)
class Database:
    """Measured operators of one system with vLLM."""

    system: str
    version: str  # of vLLM
    release: str  # of aiconfigurator-core
    handle: Any
    common: Any
    operations: Any

    @classmethod
    def open(cls, system: str) -> Database:
        """Raises AiconfiguratorError."""
        release = _release()
        import aiconfigurator_core.sdk.operations as operations
        from aiconfigurator_core.sdk import common, perf_database

        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
        known = sorted(perf_database.get_supported_databases())
        if system not in known:
            raise AiconfiguratorError(
                f"aiconfigurator-core {release} has no system {system!r}; {', '.join(known)}"
            )
        try:
            handle = perf_database.get_database(system, "vllm", "current")
        except Exception as error:
            raise AiconfiguratorError(
                f"aiconfigurator-core {release} has no vLLM data of {system} ({_line(error)})"
            ) from error
        if handle is None:
            raise AiconfiguratorError(f"aiconfigurator-core {release} has no vLLM data of {system}")
        return cls(system, str(handle.version), release, handle, common, operations)

    def ms(self, operation: Any, **at: int) -> float:
        """Of one operator at a point."""
        return float(operation._engine_query(self.handle, **at))

    @property
    def source(self) -> str:
        return f"aiconfigurator-core {self.release}, {self.system}, vLLM {self.version}"

    def gpu(self, name: str) -> GpuSpec:
        """The system's card under a name."""
        card = self.handle.system_spec["gpu"]
        half = card.get("bfloat16_tc_flops") or card.get("float16_tc_flops")
        return GpuSpec(
            name, name, card["mem_capacity"] / 2**30, card["mem_bw"] / 1e9, half / 1e12,
            float(card.get("power") or 0.0), float(card.get("sm_version") or 0) / 10.0,
        )  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One model's layer on one GPU of a tensor parallel group."""

    database: Database
    model: ModelSpec
    tp: int

    def rows(self) -> Iterator[LayerRow]:
        """Decode and prefill on the grid; communication left out."""
        source = self.database.source
        for batch in DECODE[0]:
            for context in DECODE[1]:
                linear, attention = self.linear_ms(batch), self._decode_ms(batch, context)
                head = self.head_ms(batch, batch)
                yield LayerRow("decode", batch, batch, context, linear, attention, head, source)
        for tokens in PREFILL[0]:
            for context in PREFILL[1]:
                linear, attention = self.linear_ms(tokens), self._prefill_ms(tokens, context)
                head = self.head_ms(tokens, 1)
                yield LayerRow("prefill", 1, tokens, context, linear, attention, head, source)

    def linear_ms(self, tokens: int) -> float:
        """GEMMs, experts and element-wise work."""
        m, tp, ops = self.model, self.tp, self.database.operations
        kv_heads = max(1, m.kv_heads // tp)
        found = self._gemm((m.heads // tp + 2 * kv_heads) * m.head_dim, m.hidden, tokens)
        found += self._gemm(m.hidden, m.heads * m.head_dim // tp, tokens, low_precision_input=True)
        norm = ops.ElementWise("norm", 1, 2 * m.hidden, 2 * m.hidden, NORM_SHARE)
        found += 2.0 * self.database.ms(norm, x=tokens)
        if m.is_moe:
            return found + self._experts_ms(tokens)
        inner = m.intermediate // tp
        found += self._gemm(2 * inner, m.hidden, tokens)
        found += self._gemm(m.hidden, inner, tokens, low_precision_input=True)
        gate = ops.ElementWise("gate", 1, 2 * inner, inner, NORM_SHARE)
        return found + self.database.ms(gate, x=tokens)

    def head_ms(self, tokens: int, rows: int) -> float:
        """Embedding of the step's tokens with its all-reduce, logits of so many rows."""
        m, tp, ops = self.model, self.tp, self.database.operations
        modes = self.database.common.GEMMQuantMode
        embedding = ops.Embedding("embedding", 1, m.vocab // tp, m.hidden, EMBEDDING_SHARE)
        logits = ops.GEMM("logits", 1, m.vocab // tp, m.hidden, modes.bfloat16)
        found = self.database.ms(embedding, x=tokens) + self.database.ms(logits, x=rows)
        if tp > 1:
            reduce = ops.CustomAllReduce("embedding", 1, m.hidden, tp)
            found += self.database.ms(reduce, x=tokens)
        return found

    def _experts_ms(self, tokens: int) -> float:
        m, ops, common = self.model, self.database.operations, self.database.common
        mode = {
            "bf16": common.MoEQuantMode.bfloat16,
            "fp8": common.MoEQuantMode.fp8_block,
        }[m.dtype]
        router = ops.GEMM("router", 1, m.experts, m.hidden, common.GEMMQuantMode.bfloat16)
        experts = ops.MoE(
            "experts", 1, m.hidden, m.moe_intermediate, m.experts_per_token, m.experts, self.tp, 1,
            mode, SKEW, 1,
        )  # fmt: skip
        return self.database.ms(router, x=tokens) + self.database.ms(experts, x=tokens)

    def _gemm(self, n: int, k: int, tokens: int, **more: bool) -> float:
        modes = self.database.common.GEMMQuantMode
        mode = {"bf16": modes.bfloat16, "fp8": modes.fp8}[self.model.dtype]
        gemm = self.database.operations.GEMM("gemm", 1, n, k, mode, **more)
        return self.database.ms(gemm, x=tokens)

    def _decode_ms(self, batch: int, context: int) -> float:
        heads, kv_heads, more = self._heads()
        kv = self.database.common.KVCacheQuantMode.bfloat16
        attention = self.database.operations.GenerationAttention(
            "generation_attention", 1, heads, kv_heads, kv, **more
        )
        return self.database.ms(attention, batch_size=batch, s=context)

    def _prefill_ms(self, tokens: int, context: int) -> float:
        heads, kv_heads, more = self._heads()
        common = self.database.common
        attention = self.database.operations.ContextAttention(
            "context_attention", 1, heads, kv_heads, common.KVCacheQuantMode.bfloat16,
            common.FMHAQuantMode.bfloat16, cp_size=1, **more,
        )  # fmt: skip
        return self.database.ms(attention, batch_size=1, s=tokens, prefix=context)

    def _heads(self) -> tuple[int, int, dict[str, Any]]:
        m = self.model
        normed = m.name.startswith(QK_NORM)
        more = {"head_size": m.head_dim, "use_qk_norm": normed}
        return m.heads // self.tp, max(1, m.kv_heads // self.tp), more


def profile_from(
    system: str, model: ModelSpec, gpu: GpuSpec | None, gpu_name: str, sizes: Sequence[int] = ()
) -> Profile:
    """Tables of a model on a system, filed under a GPU (a new one of that name without `gpu`).

    Without `sizes` all that divide the model's heads. Raises AiconfiguratorError.
    """
    if model.dtype not in {"bf16", "fp8"}:
        raise AiconfiguratorError(
            f"{model.name} is in {model.dtype}; layers are added up in bf16 and fp8"
        )
    database = Database.open(system)
    card = gpu or database.gpu(gpu_name)
    wanted = tuple(sizes) or tuple(tp for tp in SIZES if model.heads % tp == 0)
    tables = {}
    for tp in wanted:
        label = f"{model.name} {model.dtype} on {card.name} TP{tp}"
        try:
            tables[tp] = repair(label, list(Layer(database, model, tp).rows()))
        except (RuntimeError, ValueError, KeyError, ArithmeticError) as error:
            raise AiconfiguratorError(
                f"{database.source} has not all that {model.name} ({model.dtype}, TP{tp}) needs: "
                f"{_line(error)}"
            ) from error
    return Profile(
        gpu=card,
        model=model,
        tables=tables,
        source=database.source,
        all_reduce=tuple(_reduces(database, wanted)),
        provenance={"system": system, "vllm": database.version, "release": database.release,
                    "licence": "Apache-2.0"},
    )  # fmt: skip


def _reduces(database: Database, sizes: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    for tp in sizes:
        if tp > 1:
            reduce = database.operations.CustomAllReduce("all-reduce", 1, REDUCED_HIDDEN, tp)
            for size in MESSAGES:
                yield tp, size, database.ms(reduce, x=size // (2 * REDUCED_HIDDEN))


def _release() -> str:
    try:
        found = importlib.metadata.version("aiconfigurator-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise AiconfiguratorError(
            "aiconfigurator-core is not installed: pip install 'coral-serving[aiconfigurator]'"
        ) from error
    if not found.startswith(SERIES):
        raise AiconfiguratorError(
            f"aiconfigurator-core {found} is installed, the importer knows {SERIES}*; "
            "pip install 'coral-serving[aiconfigurator]'"
        )
    return found


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__

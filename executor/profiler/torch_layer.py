"""One decoder layer in plain torch: RMS norms, grouped-query attention by SDPA, SwiGLU or experts.

The shapes are those of one rank of a tensor parallel group; the two all-reduces are measured apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shapes:
    """Of one rank."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # of the MLP, or of one expert
    experts: int
    chosen: int
    vocab: int
    norm_heads: bool  # queries and keys are normed

    @classmethod
    def of(cls, config: dict[str, Any], tp: int) -> Shapes:
        """From a config.json."""
        heads = config["num_attention_heads"]
        experts = config.get("num_local_experts") or config.get("num_experts") or 0
        inner = config.get("moe_intermediate_size") if experts else None
        return cls(
            hidden=config["hidden_size"],
            heads=heads // tp,
            kv_heads=max(1, (config.get("num_key_value_heads") or heads) // tp),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            inner=(inner or config["intermediate_size"]) // tp,
            experts=experts,
            chosen=config.get("num_experts_per_tok") or 0,
            vocab=config["vocab_size"] // tp,
            norm_heads=str((config.get("architectures") or [""])[0]).startswith("Qwen3"),
        )


class Layer:
    """Random weights of one layer, and what a step does with them."""

    def __init__(self, shapes: Shapes, device: str, dtype: str) -> None:
        import torch

        self.torch, self.shapes, self.device = torch, shapes, device
        self.kind = getattr(torch, dtype)
        s = shapes
        self.qkv = self._weight(s.hidden, (s.heads + 2 * s.kv_heads) * s.head_dim)
        self.o = self._weight(s.heads * s.head_dim, s.hidden)
        self.norms = self._weight(4, s.hidden)
        if s.experts:
            self.router = self._weight(s.hidden, s.experts)
            self.up = self._weight(s.experts, s.hidden, 2 * s.inner)
            self.down = self._weight(s.experts, s.inner, s.hidden)
        else:
            self.up = self._weight(s.hidden, 2 * s.inner)
            self.down = self._weight(s.inner, s.hidden)

    @property
    def graphable(self) -> bool:
        """Experts one after another depend on the tokens."""
        return not self.shapes.experts or self._grouped

    @property
    def kernels(self) -> str:
        kind = "grouped matmul" if self._grouped else "one matmul per expert"
        return "torch SDPA" + (f", experts by {kind}" if self.shapes.experts else "")

    def linear(self, x: Any) -> Any:
        """Everything but attention, of `x` (tokens, hidden)."""
        s = self.shapes
        x = self._norm(x, 0)
        qkv = x @ self.qkv
        q = qkv[:, : s.heads * s.head_dim]
        k = qkv[:, s.heads * s.head_dim : (s.heads + s.kv_heads) * s.head_dim]
        mixed = self._rotated(q) + 0.01 * self._rotated(k).mean()
        x = x + mixed @ self.o
        return x + self._mlp(self._norm(x, 1))

    def attention(self, q: Any, k: Any, v: Any, causal: bool) -> Any:
        """Of `q` (sequences, heads, new, width) over `k`, `v` (sequences, kv heads, all, width)."""
        functional = self.torch.nn.functional
        mask = None
        if causal and q.shape[2] != k.shape[2]:  # the new tokens are the last ones
            mask = self.torch.ones(
                q.shape[2], k.shape[2], dtype=self.torch.bool, device=self.device
            ).tril(k.shape[2] - q.shape[2])
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=True
        )

    def random(self, *size: int) -> Any:
        """Standard normal numbers."""
        return self.torch.randn(*size, device=self.device, dtype=self.kind)

    def _weight(self, *size: int) -> Any:
        return self.random(*size) * size[-2] ** -0.5

    def _norm(self, x: Any, which: int) -> Any:
        return self.torch.nn.functional.rms_norm(x, (x.shape[-1],), self.norms[which])

    def _rotated(self, q: Any) -> Any:
        """Rotary embedding; positions do not change its cost."""
        heads = q.view(q.shape[0], -1, self.shapes.head_dim)
        if self.shapes.norm_heads:
            heads = self.torch.nn.functional.rms_norm(heads, (self.shapes.head_dim,))
        a, b = heads.chunk(2, dim=-1)
        return self.torch.cat((0.6 * a - 0.8 * b, 0.6 * b + 0.8 * a), dim=-1).view(q.shape)

    def _mlp(self, x: Any) -> Any:
        if not self.shapes.experts:
            return self._gated(x @ self.up) @ self.down
        weights, chosen = (x @ self.router).softmax(-1).topk(self.shapes.chosen)
        order = chosen.flatten().argsort()
        rows = x[order // self.shapes.chosen]
        counts = self.torch.bincount(chosen.flatten(), minlength=self.shapes.experts)
        found = self._grouped_experts(rows, counts) if self._grouped else self._each(rows, counts)
        found = found * weights.flatten()[order].unsqueeze(1)
        return self.torch.zeros_like(x).index_add_(0, order // self.shapes.chosen, found)

    def _grouped_experts(self, rows: Any, counts: Any) -> Any:
        ends = counts.cumsum(0).to(self.torch.int32)
        inner = self._gated(self.torch._grouped_mm(rows, self.up, offs=ends))
        return self.torch._grouped_mm(inner, self.down, offs=ends)

    def _each(self, rows: Any, counts: Any) -> Any:
        parts = rows.split(counts.tolist())
        return self.torch.cat(
            [
                self._gated(part @ self.up[number]) @ self.down[number]
                for number, part in enumerate(parts)
                if len(part)
            ]
        )

    def _gated(self, x: Any) -> Any:
        gate, up = x.chunk(2, dim=-1)
        return self.torch.nn.functional.silu(gate) * up

    @property
    def _grouped(self) -> bool:
        return (
            self.device == "cuda"
            and self.kind is self.torch.bfloat16
            and hasattr(self.torch, "_grouped_mm")
        )

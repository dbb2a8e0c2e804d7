"""A model's shapes and bytes from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.errors import InputError
from planner.types import ModelSpec

DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
EXPERTS = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
ARCHITECTURES = (*DENSE, *EXPERTS)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TABLE_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}  # as the performance tables name them


class ModelConfigError(InputError):
    """A config.json that Coral can't take shapes from."""


def model_from_config(name: str, config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Shapes of a model whose weights and KV are kept in `dtype` (as torch names it).

    Raises ModelConfigError: another architecture or dtype, or a field is missing.
    """
    found = (config.get("architectures") or ["none"])[0]
    if found not in ARCHITECTURES:
        raise ModelConfigError(
            f"{name}: shapes of {found} are unknown; supported: {', '.join(ARCHITECTURES)}"
        )
    if dtype not in DTYPE_BYTES:
        raise ModelConfigError(f"{name}: unknown dtype {dtype!r}; one of {', '.join(DTYPE_BYTES)}")
    if config.get("quantization_config"):
        raise ModelConfigError(f"{name}: its weights are quantised, which Coral has no shapes of")
    try:
        return _spec(name, found, config, dtype)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelConfigError(f"{name}: its config.json lacks {error}") from error


def _spec(name: str, architecture: str, config: Mapping[str, Any], dtype: str) -> ModelSpec:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    inner, vocab = int(config["intermediate_size"]), int(config["vocab_size"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or hidden // heads)
    experts, chosen, expert_inner = _experts(name, architecture, config)
    size = DTYPE_BYTES[dtype]
    layer = 2 * hidden * heads * width + 2 * hidden * kv_heads * width + 2 * hidden  # two norms
    if architecture.startswith("Qwen3"):
        layer += 2 * width  # norms of queries and keys
    if architecture == "Qwen2ForCausalLM":
        layer += (heads + 2 * kv_heads) * width  # biases
    layer += experts * (3 * hidden * expert_inner + hidden) if experts else 3 * hidden * inner
    return ModelSpec(
        name=name,
        dtype=TABLE_DTYPES.get(dtype, dtype),
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        intermediate=inner,
        experts=experts,
        experts_per_token=chosen,
        moe_intermediate=expert_inner,
        vocab=vocab,
        weight_bytes=size,
        expert_weight_bytes=size if experts else 0.0,
        bytes_per_layer=layer * size,
        embed_bytes=vocab * hidden * size,
        lm_head_bytes=vocab * hidden * size,  # the last stage has its own, also of tied ones
        kv_bytes_per_token_per_layer=2 * kv_heads * width * size,
        hop_bytes_per_token=2 * hidden * size,  # hidden states and residual
    )


def _experts(name: str, architecture: str, config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Experts, those of a token, and their inner width; zeros of a dense model."""
    if architecture not in EXPERTS:
        return 0, 0, 0
    if int(config.get("decoder_sparse_step") or 1) != 1 or config.get("mlp_only_layers"):
        raise ModelConfigError(f"{name}: layers with and without experts are not supported")
    if architecture == "MixtralForCausalLM":
        count = int(config["num_local_experts"])
        return count, int(config["num_experts_per_tok"]), int(config["intermediate_size"])
    count = int(config["num_experts"])
    return count, int(config["num_experts_per_tok"]), int(config["moe_intermediate_size"])

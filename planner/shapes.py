"""A model's shapes and bytes from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.errors import InputError
from planner.types import ModelSpec

ARCHITECTURES = ("LlamaForCausalLM",)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelConfigError(InputError):
    """A config.json that Coral can't take shapes from."""


def model_from_config(name: str, config: Mapping[str, Any], dtype: str) -> ModelSpec:
    """Shapes of a dense Llama whose weights and KV are kept in `dtype`.

    Raises ModelConfigError: another architecture or dtype, or a field is missing.
    """
    found = (config.get("architectures") or ["none"])[0]
    if found not in ARCHITECTURES:
        raise ModelConfigError(
            f"{name}: shapes of {found} are unknown; supported: {', '.join(ARCHITECTURES)}"
        )
    if dtype not in DTYPE_BYTES:
        raise ModelConfigError(f"{name}: unknown dtype {dtype!r}; one of {', '.join(DTYPE_BYTES)}")
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        inner, vocab = int(config["intermediate_size"]), int(config["vocab_size"])
        layers = int(config["num_hidden_layers"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        width = int(config.get("head_dim") or hidden // heads)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelConfigError(f"{name}: its config.json lacks {error}") from error
    size = DTYPE_BYTES[dtype]
    attention = 2 * hidden * heads * width + 2 * hidden * kv_heads * width
    norms = 2 * hidden
    embedding = vocab * hidden * size
    return ModelSpec(
        name=name,
        dtype=dtype,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        intermediate=inner,
        experts=0,
        experts_per_token=0,
        moe_intermediate=0,
        vocab=vocab,
        weight_bytes=size,
        expert_weight_bytes=0.0,
        bytes_per_layer=(attention + 3 * hidden * inner + norms) * size,
        embed_bytes=embedding,
        lm_head_bytes=0 if config.get("tie_word_embeddings") else embedding,
        kv_bytes_per_token_per_layer=2 * kv_heads * width * size,
        hop_bytes_per_token=2 * hidden * size,  # hidden states and residual
    )

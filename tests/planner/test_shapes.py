"""Shapes from config.json, against every shipped row of a supported architecture."""

from __future__ import annotations

import polars as pl
import pytest

from catalog.seed import seed_folder
from planner.shapes import ARCHITECTURES, ModelConfigError, model_from_config

FAMILIES = {
    "Qwen/Qwen3-Coder": "Qwen3MoeForCausalLM",
    "Qwen/Qwen3-30B": "Qwen3MoeForCausalLM",
    "Qwen/Qwen3-235B": "Qwen3MoeForCausalLM",
    "Qwen/Qwen3": "Qwen3ForCausalLM",
    "Qwen/Q": "Qwen2ForCausalLM",
    "meta-llama": "LlamaForCausalLM",
    "codellama": "LlamaForCausalLM",
    "deepseek-ai/DeepSeek-R1-Distill-Llama": "LlamaForCausalLM",
    "HuggingFaceTB": "LlamaForCausalLM",
    "mistralai/Mixtral": "MixtralForCausalLM",
    "mistralai": "MistralForCausalLM",
}
ROWS = [
    (next(family for name, family in FAMILIES.items() if row["hf_id"].startswith(name)), row)
    for row in pl.read_csv(seed_folder() / "model_specs.csv").iter_rows(named=True)
    if row["hf_id"].startswith(tuple(FAMILIES))
]


def config(family: str, row: dict) -> dict:
    """The config.json that the row was taken from, as far as shapes need it."""
    found = {
        "architectures": [family], "hidden_size": row["hidden"], "head_dim": row["head_dim"],
        "num_attention_heads": row["heads"], "num_key_value_heads": row["kv_heads"],
        "intermediate_size": row["intermediate"], "vocab_size": row["vocab"],
        "num_hidden_layers": row["layers"], "tie_word_embeddings": row["tied_embeddings"],
    }  # fmt: skip
    if row["experts"]:
        key = "num_local_experts" if family.startswith("Mixtral") else "num_experts"
        found |= {key: row["experts"], "num_experts_per_tok": row["topk"],
                  "moe_intermediate_size": row["moe_intermediate"]}  # fmt: skip
    return found


def test_every_supported_architecture_has_a_row() -> None:
    assert {family for family, _ in ROWS} == set(ARCHITECTURES)


@pytest.mark.parametrize(("family", "row"), ROWS, ids=[row["hf_id"] for _, row in ROWS])
def test_shapes_and_bytes_equal_the_shipped_ones(family: str, row: dict) -> None:
    found = model_from_config(row["hf_id"], config(family, row), "bfloat16")
    assert (found.dtype, found.layers, found.experts) == ("bf16", row["layers"], row["experts"])
    assert (found.experts_per_token, found.moe_intermediate) == (
        row["topk"], row["moe_intermediate"],
    )  # fmt: skip
    for name in ("bytes_per_layer", "embed_bytes", "lm_head_bytes", "kv_bytes_per_token_per_layer"):
        assert getattr(found, name) == row[name], name
    assert found.hop_bytes_per_token == row["vllm_pp_bytes_per_token"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel are unknown.*Qwen3Moe"),
        ({"architectures": []}, "none are unknown"),
        ({"hidden_size": None}, "lacks"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"mlp_only_layers": [0]}, "with and without experts"),
        ({"num_experts": 0, "num_experts_per_tok": "many"}, "lacks"),
    ],
)
def test_a_config_without_shapes_is_refused(change: dict, said: str) -> None:
    family, row = next(pair for pair in ROWS if pair[0] == "Qwen3MoeForCausalLM")
    with pytest.raises(ModelConfigError, match=said):
        model_from_config("m", {**config(family, row), **change}, "bfloat16")

"""Makes a tiny random model with a tokenizer of its own: something real for vLLM to serve.

    python tiny_model.py FOLDER [--layers 4] [--hidden 256] [--kind llama]

Runs in the environment of vLLM (it needs torch, transformers and tokenizers). The weights are drawn
from a fixed seed, so that two machines make the same model.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

SENTENCE = "the reef is full of small fish that swim in shoals over the white sand"
END = "<|end|>"
# What a kind's configuration has beside what all have, by hidden size.
KINDS: dict[str, Callable[[int], dict[str, object]]] = {
    "llama": lambda hidden: {},
    "gemma3_text": lambda hidden: {
        "head_dim": hidden // 4, "sliding_window": 32, "query_pre_attn_scalar": hidden // 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3": lambda hidden: {"head_dim": hidden // 4},
    "qwen3_moe": lambda hidden: {
        "head_dim": hidden // 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden // 2, "norm_topk_prob": True,
    },
}  # fmt: skip


def make(folder: Path, layers: int, hidden: int, kind: str) -> None:
    """Write config, weights and tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([SENTENCE] * 8, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    wrapped.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=wrapped.eos_token_id,
        tie_word_embeddings=False,
        **KINDS[kind](hidden),
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    model.save_pretrained(folder)


def main() -> None:
    """Parse and make."""
    parser = argparse.ArgumentParser(description="A tiny random model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--kind", choices=sorted(KINDS), default="llama")
    options = parser.parse_args()
    make(options.folder, options.layers, options.hidden, options.kind)


if __name__ == "__main__":
    main()

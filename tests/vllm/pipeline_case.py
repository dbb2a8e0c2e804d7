"""Runs in vLLM's environment: the same prompts through plain vLLM, or through a pipeline.

    python pipeline_case.py MODEL OUT.json [--layout LAYOUT] [--max-tokens 24] ...

Greedy, float32, batches of 24 prompts of different lengths, prompts in chunks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "executor" / "vllm_pipeline"


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layout", type=Path)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--kv-bytes", type=int, default=64 * 2**20)
    options = parser.parse_args()
    from coral_vllm_pipeline.version import answer_for_vllm

    answer_for_vllm()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    nodes = []
    more: dict[str, object] = {}
    if options.layout is not None:
        from coral_vllm_pipeline.layout import ENVIRONMENT, read_layout
        from coral_vllm_pipeline.serve import engine_options

        layout = read_layout(options.layout)
        os.environ[ENVIRONMENT] = str(options.layout)
        for s, stage in enumerate(layout.stages):
            for n in range(len(stage.nodes)):
                command = [sys.executable, "-m", "coral_vllm_pipeline.node",
                           str(options.layout), str(s), str(n)]  # fmt: skip
                nodes.append(subprocess.Popen(command))
        more = engine_options(len(layout.stages))
    try:
        options.out.write_text(json.dumps(generate(options, more)))
    finally:
        for node in nodes:
            node.terminate()


def generate(options: argparse.Namespace, more: dict[str, object]) -> dict[str, object]:
    """Tokens of every prompt, and how often a request was preempted."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=options.model, dtype="float32", enforce_eager=True, max_model_len=128,
        kv_cache_memory_bytes=options.kv_bytes, max_num_seqs=32, max_num_batched_tokens=64,
        block_size=32, enable_prefix_caching=False, disable_log_stats=False, seed=0, **more,
    )  # fmt: skip
    prompts = [
        {"prompt_token_ids": [(7 * k + 13 * n + n * n) % 500 + 1 for n in range(8 + 5 * k % 60)]}
        for k in range(options.prompts)
    ]
    settings = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    tokens = [list(one.outputs[0].token_ids) for one in engine.generate(prompts, settings)]
    preempted = [one.value for one in engine.get_metrics() if one.name == "vllm:num_preemptions"]
    return {"tokens": tokens, "preemptions": sum(preempted)}


if __name__ == "__main__":
    sys.path.insert(0, str(PACKAGE))
    main()

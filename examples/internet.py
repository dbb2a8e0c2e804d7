"""The scenario `internet`: 46 open models over 40 node classes in 30 domains, two markets.

    python -m examples.internet

writes `examples/internet.yaml` from the shipped data and the rules below. No public figure says who
asks which model how much, so demand, objectives and much of the stock are assumptions.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

from catalog.seed import import_seed
from catalog.store import Catalog
from planner.known import Known
from planner.types import ModelSpec
from tasks.inputs import read_known

CLOUDS = ("aws", "azure", "gcp")
DOMAINS_PER_CLOUD = 10
TOTAL_RPS = 18_000.0  # of all models
GIB = 2**30
# Weights of at most so many GiB: objectives in ms, time to first token and per output token.
OBJECTIVES = ((32, 1000, 40), (80, 1500, 60), (200, 2000, 100), (500, 3000, 100), (1200, 4000, 150))

# By assumed popularity: the n-th is asked 1/n as often as the first (Zipf).
MODELS = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "openai/gpt-oss-20b",
    "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "Qwen/Qwen3-30B-A3B",
    "mistralai/Mistral-7B-Instruct-v0.3",
    "Qwen/Qwen3-32B",
    "openai/gpt-oss-120b",
    "google/gemma-3-27b-it",
    "Qwen/Qwen2.5-72B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
    "google/gemma-2-9b-it",
    "Qwen/Qwen3-14B",
    "microsoft/phi-4",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    "Qwen/Qwen2.5-Coder-32B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "google/gemma-3-4b-it",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/QwQ-32B",
    "Qwen/Qwen3-4B",
    "meta-llama/Llama-3.1-70B-Instruct",
    "google/gemma-3-12b-it",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-14B-Instruct",
    "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen2.5-32B-Instruct",
    "microsoft/Phi-3.5-mini-instruct",
    "Qwen/Qwen2.5-Coder-7B-Instruct",
    "google/gemma-2-2b-it",
    "Qwen/Qwen3-1.7B",
    "google/gemma-2-27b-it",
    "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen3-0.6B",
    "mistralai/Mistral-Large-Instruct-2407",
    "meta-llama/Llama-3.1-405B-Instruct",
    "google/gemma-3-1b-it",
    "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "codellama/CodeLlama-34b-Instruct-hf",
    "mistralai/Mathstral-7B-v0.1",
    "codellama/CodeLlama-13b-Instruct-hf",
)

HEAD = """\
# Written by `python -m examples.internet`: change that, not this.
# Demand follows Zipf's law over the models, {total:,.0f} requests/s in all; objectives go by the
# size of the weights; domains are the {domains} of each cloud with the most node classes on offer.
name: internet
description: {models} open models, {classes} node classes, {places} domains of AWS, Azure and GCP.
"""

TAIL = """
markets: [on_demand, spot]

# No public count of GPU stock exists. 27 instance types have an assumed one; where it has none, an
# instance type counts as so many GPUs per domain.
stock: {level: limited, factor: 1.0, unknown_gpus: 32}

placement:
  max_nodes: 2  # nodes of one replica
  memory_ratio: 12  # a combination's memory is at most so many times the model's weights
  least_gain: 0.01  # a template must serve so much more than its parts: what a plan may lose

allocation:
  horizon_hours: 1.0
  startup_minutes: 10
  relative_gap: 0.01
  deadline_s: 60
"""


def internet_yaml(known: Known) -> str:
    """The scenario file, byte for byte the same for the same shipped data."""
    classes = sorted(
        {k.node.name for k in known.instance_types if k.cloud in CLOUDS},
        key=lambda name: (name.rsplit(" x", 1)[0], int(name.rsplit(" x", 1)[1])),
    )
    domains = _domains(known)
    lines = [
        HEAD.format(
            total=TOTAL_RPS,
            domains=DOMAINS_PER_CLOUD,
            models=len(MODELS),
            classes=len(classes),
            places=len(domains),
        ),
        "workloads:",
    ]
    harmonic = sum(1.0 / rank for rank in range(1, len(MODELS) + 1))
    for rank, name in enumerate(MODELS, start=1):
        ttft_ms, tpot_ms = _objectives(known.models[name])
        lengths = "azure2023_code" if "Code" in name else "azure2023_conv"
        lines += [
            f"  - model: {name}",
            f"    slo: {{ttft_ms: {ttft_ms}, tpot_ms: {tpot_ms}}}",
            f"    lengths: {lengths}",
            f"    demand: {{requests_per_s: {TOTAL_RPS / harmonic / rank:.2f}}}",
        ]
    lines += ["", "node_classes:", *(f"  - {name}" for name in classes)]
    lines += ["", "domains:", *(f'  - "{name}"' for name in domains)]
    return "\n".join(lines) + "\n" + TAIL


def _objectives(model: ModelSpec) -> tuple[int, int]:
    """TTFT and TPOT in ms by the size of the weights."""
    size = model.total_bytes / GIB
    return next((ttft, tpot) for most, ttft, tpot in OBJECTIVES if size <= most)


def _domains(known: Known) -> list[str]:
    """Of each cloud the domains with the most node classes on offer, then by name."""
    offered: dict[str, set[str]] = defaultdict(set)
    for row in known.prices:
        offered[row.domain].add(row.node_class)
    chosen: list[str] = []
    for cloud in CLOUDS:
        own = [name for name in offered if name.split(":")[0] == cloud]
        own.sort(key=lambda name: (-len(offered[name]), name))
        chosen += sorted(own[:DOMAINS_PER_CLOUD])
    return chosen


def main() -> None:
    """Write the file beside this module."""
    with tempfile.TemporaryDirectory() as home:
        catalog = Catalog(Path(home))
        with catalog.write() as connection:
            import_seed(connection)
        with catalog.read() as connection:
            known = read_known(connection)
    Path(__file__).with_suffix(".yaml").write_text(internet_yaml(known), encoding="utf-8")


if __name__ == "__main__":
    main()

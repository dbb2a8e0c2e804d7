"""The profiler with real torch and vLLM, on one core: small models, short runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from planner.perf.serving import Loop, loop_figures
from planner.types import Link, NodeClass
from tasks.profile_file import read_measurements
from tasks.profile_run import ProfileRequest, ProfilerRefusedError, run_profiler
from tasks.profile_tables import performance_of, profile_of, with_layers

from .conftest import VENV

PYTHON = str(VENV / "bin" / "python")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
    "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 512, "num_hidden_layers": 3, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "torch_dtype": "float32", "hidden_act": "silu",
}  # fmt: skip
MOE = {
    **LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "moe_intermediate_size": 384, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 64,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
SMALL = (("batch", 4), ("context", 128), ("tokens", 64))


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["dense", "moe"])
def test_torchs_own_layer(config: dict, tmp_path: Path) -> None:
    request = ProfileRequest(
        config, "small", PYTHON, "cpu", "torch", minutes=0.3, cores=("0", "1"), tp=(1, 2),
        limits=SMALL,
    )  # fmt: skip
    path = run_profiler(request, tmp_path / "a.json")
    found = read_measurements(path)
    assert found.sizes == [1, 2] and found.complete
    assert all(point.linear_ms > 0 and point.attention_ms > 0 for point in found.points)
    assert {row.tp for row in found.links.all_reduce} == {2} and found.links.hop
    assert found.machine.torch.startswith("2.")
    before = path.read_text()
    run_profiler(request, path)  # nothing is left to measure
    assert json.loads(before)["points"] == json.loads(path.read_text())["points"]
    with pytest.raises(ProfilerRefusedError, match="another dtype"):
        run_profiler(ProfileRequest(config, "small", PYTHON, "cpu", "torch", "bfloat16"), path)


def test_vllms_own_steps_predict_its_own_runs(local_run: tuple[Path, dict]) -> None:
    """Those that `coral serve-local` measured."""
    (path,) = (local_run[0] / "profiles" / "CPU").glob("*.json")
    found = read_measurements(path)
    assert found.backend == "vllm" and found.kernels["1"].startswith("vLLM attention")
    profile = profile_of(found, "small", found.gpu("CPU"))
    assert {row.phase for row in profile.tables[1].rows} == {"decode", "prefill", "mixed"}
    assert len(profile.engine) == 3
    node = NodeClass("CPU x1", profile.gpu, 1, Link.PCIE, 1.0, 1.0)
    rows = {1: profile.tables[1].rows}
    performance = performance_of(profile.gpu, profile.model, rows, ())
    real = next(pair for pair in profile.engine if pair.concurrency == 4)
    model = with_layers(profile.model, real.layers)
    said = loop_figures(performance, model, node, 1, Loop(4, 64, 32), 0.0)
    assert said.tpot_ms == pytest.approx(real.predicted_tpot_ms)
    assert 0.3 < said.tpot_ms / real.measured_tpot_ms < 1.5  # the engine's overhead is missing


def test_no_gpu_is_said(tmp_path: Path) -> None:
    ask = "import torch; print(torch.cuda.is_available())"
    if subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True).stdout != "False\n":
        pytest.skip("there is a GPU")
    with pytest.raises(ProfilerRefusedError, match="no GPU here that torch can use"):
        run_profiler(ProfileRequest(LLAMA, "small", PYTHON, "cuda"), tmp_path / "a.json")

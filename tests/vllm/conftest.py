"""Tests with a real vLLM: `make test-vllm` sets it up and runs them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.deployment import EngineSpec
from executor.stage_plan import Connector
from executor.vllm.environment import PIPELINES
from planner.types import Phase
from tasks.local_site import ENVIRONMENT

from .local import serve_local
from .site import MODEL, Site, replica, site_at

VENV = Path(__file__).parents[2] / ".venv-vllm"
FOLDER = Path(__file__).parents[2] / "executor" / "vllm"

collect_ignore_glob = [] if os.environ.get("CORAL_TEST_VLLM") else ["test_*.py"]


@pytest.fixture(scope="session")
def vllm_command() -> tuple[str, ...]:
    return (str(VENV / "bin" / "python"), str(FOLDER / "launch.py"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Other architectures by name."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_model(folder / kind, kind) for kind in ("qwen3", "qwen3_moe", "gemma3_text")}


def make_model(folder: Path, kind: str) -> Path:
    command = [VENV / "bin" / "python", FOLDER / "tiny_model.py", folder, "--kind", kind]
    subprocess.run(command, check=True, timeout=300)
    return folder


@pytest.fixture(scope="session")
def engines(
    vllm_command: tuple[str, ...], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, EngineSpec]:
    """How the model is started: compiled by its own name, all others eagerly, which is sooner.

    Stock vLLM fails the first request of an eager pipeline with a given size of KV.
    """
    compiled = EngineSpec(
        command=vllm_command,
        model_path=str(tiny_model),
        max_model_len=512,
        dtype="float32",
        kv_cache_bytes=128 * 2**20,
        block_size=32,
        kv_folder=str(tmp_path_factory.mktemp("kv")),
        kv_device="cpu",
        environment=ENVIRONMENT,
    )
    environment = {**ENVIRONMENT, "TORCH_COMPILE_DISABLE": "1"}
    eager = compiled.model_copy(
        update={"arguments": ("--enforce-eager",), "environment": environment}
    )
    pipelines = {
        "pipeline_python": str(VENV / "bin" / "python"),
        "environment": {**environment, "PYTHONPATH": str(PIPELINES)},
    }
    return {
        MODEL: compiled,
        "coral": eager.model_copy(update=pipelines),
        **{kind.value: eager.model_copy(update={"connector": kind}) for kind in Connector},
    }


@pytest.fixture(scope="session")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """`coral serve-local` from an empty home: that home, with what was measured, and its answer."""
    home = tmp_path_factory.mktemp("home")
    return home, serve_local(home)


@pytest.fixture(scope="session")
def site(
    engines: dict[str, EngineSpec], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    with site_at(tmp_path_factory.mktemp("site"), engines) as found:
        yield found


@pytest.fixture(scope="session")
def alone(site: Site) -> list[str]:
    """What a single process answers."""
    site.deploy(replica("alone", Phase.AGGREGATED, ("n0", 4), engine="nixl"))
    site.wait("alone")
    return site.texts()

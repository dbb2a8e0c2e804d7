"""Measure a model on this machine's cores, and take the tables into the catalog."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel, ConfigDict, ValidationError

from catalog import writes
from catalog.store import Catalog
from executor.vllm.environment import TOOLS
from planner.errors import CoralError
from planner.perf.depths import DepthSteps, LayerProfile, separate
from planner.shapes import model_from_config
from planner.types import GpuSpec

PROBE_TIMEOUT_S = 600.0
CPU_CAPABILITY = 0.0  # a family of its own in the engine's overhead


class ProbeError(CoralError):
    """The measurement failed."""


class _Step(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: int
    ms: float
    tokens: int = 0
    context: int = 0


class _Depth(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int
    prefill: tuple[_Step, ...]
    decode: tuple[_Step, ...]

    def steps(self) -> DepthSteps:
        return DepthSteps(
            self.layers,
            {(step.batch, step.context): step.ms for step in self.decode},
            {(step.batch, step.tokens): step.ms for step in self.prefill},
        )


class ProbeFile(BaseModel):
    """What executor/vllm/probe.py writes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: str
    cores: tuple[str, ...]
    torch: str
    vllm: str
    python: str
    measured_at: str
    memory_gib: float
    tflops: float
    memory_gbyte_per_s: float
    depths: tuple[_Depth, _Depth]

    @property
    def source(self) -> str:
        return (
            f"measured on {self.cpu}, cores {' '.join(self.cores)}, vLLM {self.vllm}, torch "
            f"{self.torch}, {self.measured_at[:10]}"
        )

    def profile(self) -> LayerProfile:
        """Layer rows and engine points."""
        shallow, deep = (depth.steps() for depth in self.depths)
        return separate(shallow, deep, self.source)

    def gpu(self, name: str) -> GpuSpec:
        """A core group of the machine as a GPU type."""
        return GpuSpec(
            name=name,
            profile_name=name,
            memory_gib=self.memory_gib,
            memory_bandwidth_gbyte_per_s=self.memory_gbyte_per_s,
            half_tflops=self.tflops,
            power_w=0.0,
            compute_capability=CPU_CAPABILITY,
        )


def probe(python: Path, model: Path, cores: Sequence[str], out: Path) -> ProbeFile:
    """Measure, unless the file has this model's measurement already.

    Raises ProbeError: the probe failed; its log is named.
    """
    digest = hashlib.sha256((model / "config.json").read_bytes()).hexdigest()[:12]
    found = out / f"{digest}.json"
    if not found.exists():
        out.mkdir(parents=True, exist_ok=True)
        command: list[str | Path] = [python, TOOLS / "probe.py", model, found, "--cores", *cores]
        log = found.with_suffix(".log")
        with log.open("wb") as file:
            ended = subprocess.run(
                command, stdout=file, stderr=file, timeout=PROBE_TIMEOUT_S, check=False
            )
        if ended.returncode:
            raise ProbeError(f"measuring {model} failed; {log} says why")
    try:
        return ProbeFile.model_validate_json(found.read_text())
    except ValidationError as error:
        raise ProbeError(
            f"{found} is no measurement of this Coral; remove it, and it is made anew"
        ) from error


def import_probe(
    catalog: Catalog, found: ProbeFile, name: str, folder: Path, dtype: str, gpu: str
) -> None:
    """Take a measurement into the catalog: the GPU type, the model's shapes, layers, engine."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    model, profile = model_from_config(name, config, dtype), found.profile()
    with catalog.write() as connection:
        writes.write_profile(
            connection,
            found.gpu(gpu),
            model,
            [
                (r.phase, r.batch, r.tokens, r.context, r.linear_ms, r.attention_ms, r.head_ms)
                for r in profile.rows
            ],
            [
                (r.context, 1, r.batch, r.ttft_ms, r.measured_tpot_ms, r.predicted_tpot_ms)
                for r in profile.engine
            ],
            found.source,
        )


probe_task = task(name="probe", cache_policy=NO_CACHE)(probe)
import_probe_task = task(name="import-probe", cache_policy=NO_CACHE)(import_probe)

"""What executor/profiler writes: raw points of one model on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from planner.errors import InputError
from planner.perf.depths import layer_of_depths
from planner.perf.grids import Line
from planner.perf.model import ALL_REDUCES_PER_LAYER
from planner.perf.points import LayerPoint, rows_of, whole_grid
from planner.perf.roofline import HALF_BYTES
from planner.perf.tables import LayerRow
from planner.shapes import model_from_config
from planner.types import GpuSpec, ModelSpec

LEAST_SHARE = 0.05  # of a step's layer, that must be left when all-reduces are taken off


class ProfileFileError(InputError):
    """A file that is no profile, or contradicts itself."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Machine(_Strict):
    """Where the points were measured."""

    device: Literal["cpu", "cuda"]
    name: str
    count: int
    driver: str
    torch: str
    vllm: str | None
    python: str
    measured_at: str
    memory_gib: float
    compute_capability: float
    power_w: float
    cores: tuple[str, ...] = ()
    cuda: str | None = None


class RawPoint(_Strict):
    """One point: of vLLM step times at two depths, of torch the layer's parts."""

    tp: int
    kind: Literal["decode", "prefill", "mixed"]
    batch: int
    tokens: int
    context: int
    shallow_ms: float = 0.0
    deep_ms: float = 0.0
    linear_ms: float = 0.0
    attention_ms: float = 0.0
    layer_error_ms: float = 0.0
    waited: float = 0.0

    def describe(self) -> str:
        return f"{self.kind} of batch {self.batch}, {self.tokens} tokens, context {self.context}"


class Message(_Strict):
    tp: int = 2
    bytes: int
    ms: float


class Links(_Strict):
    all_reduce: tuple[Message, ...] = ()
    hop: tuple[Message, ...] = ()
    hop_backend: str = ""


class ServingRun(_Strict):
    """One closed loop on the whole engine."""

    layers: int
    tp: int
    concurrency: int
    prompt: int
    output: int
    requests: int
    tpot_ms: float
    ttft_ms: float
    throughput_rps: float
    waited: float = 0.0
    all_tpot_ms: tuple[float, ...] = ()  # of all runs, this one is the fastest of
    all_throughput_rps: tuple[float, ...] = ()


class Head(_Strict):
    tp: int
    rows: int
    ms: float


class Measurements(_Strict):
    """The whole file."""

    format: Literal["coral-measurements-1"]
    config: dict[str, Any]
    dtype: str
    backend: Literal["vllm", "torch"]
    depths: tuple[int, int]
    machine: Machine
    rates: dict[str, float]
    clocks_mhz: dict[str, dict[str, float]] = {}
    kernels: dict[str, str] = {}
    points: tuple[RawPoint, ...]
    grids: tuple[dict[str, Any], ...] = ()
    head: tuple[Head, ...] = ()
    links: Links = Links()
    serving: tuple[ServingRun, ...] = ()
    notes: tuple[str, ...] = ()
    complete: bool = False

    @property
    def source(self) -> str:
        """Provenance of every row."""
        machine = self.machine
        cores = f", cores {' '.join(machine.cores)}" if machine.cores else ""
        engine = f"vLLM {machine.vllm}" if self.backend == "vllm" else "torch's own kernels"
        return (
            f"measured on {machine.name}{cores}, driver {machine.driver}, {engine}, torch "
            f"{machine.torch}, {machine.measured_at[:10]}"
        )

    def model(self, name: str) -> ModelSpec:
        """Shapes by the config.json that was measured."""
        return model_from_config(name, self.config, self.dtype)

    def gpu(self, name: str) -> GpuSpec:
        """The machine as a GPU type, with the rates that were measured."""
        machine = self.machine
        return GpuSpec(
            name, name, machine.memory_gib, self.rates["memory_gbyte_per_s"],
            self.rates["tflops"], machine.power_w, machine.compute_capability,
        )  # fmt: skip

    def all_reduce(self) -> dict[int, Line]:
        """Milliseconds by message bytes, by group size."""
        sizes = sorted({row.tp for row in self.links.all_reduce})
        return {
            size: Line.of(*_columns([r for r in self.links.all_reduce if r.tp == size]))
            for size in sizes
        }

    def rows(self, model: ModelSpec, tp: int) -> tuple[LayerRow, ...]:
        """Rows of the layer table at one tensor parallel size, communication taken off."""
        mine = [point for point in self.points if point.tp == tp]
        head = {one.rows: one.ms for one in self.head if one.tp == tp}
        if self.backend == "torch":
            return _torch_rows(mine, head, self.source)
        reduce = self.all_reduce().get(tp)
        points = []
        for p in mine:
            whole = layer_of_depths(p.shallow_ms, p.deep_ms, self.depths, p.describe())
            moved = 0.0
            if reduce is not None:  # as the performance model adds it
                message = HALF_BYTES * model.hidden * p.tokens
                moved = ALL_REDUCES_PER_LAYER * float(reduce(message))
            layer = max(whole - moved, LEAST_SHARE * whole)
            points.append(LayerPoint(p.kind, p.batch, p.tokens, p.context, layer))
        return rows_of(points, head, self.source)

    @property
    def sizes(self) -> list[int]:
        return sorted({point.tp for point in self.points})


def read_measurements(path: Path) -> Measurements:
    """Raises ProfileFileError: it is no file of raw points."""
    try:
        return Measurements.model_validate_json(path.read_text())
    except OSError as error:
        raise ProfileFileError(f"cannot read {path}: {error.strerror}") from error
    except (ValidationError, UnicodeDecodeError) as error:
        first = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
        raise ProfileFileError(f"{path} holds no measurements of this Coral ({first})") from error


def _columns(rows: list[Message]) -> tuple[list[float], list[float]]:
    return [float(row.bytes) for row in rows], [row.ms for row in rows]


def _torch_rows(
    points: list[RawPoint], head: dict[int, float], source: str
) -> tuple[LayerRow, ...]:
    """Rows of points whose parts were timed apart, holes left out."""
    decode = whole_grid((p.batch, p.context) for p in points if p.kind == "decode")
    single = [p for p in points if p.kind == "prefill" and p.batch == 1]
    prefill = whole_grid((p.tokens, p.context) for p in single)
    return tuple(
        LayerRow(p.kind, p.batch, p.tokens, p.context, p.linear_ms, p.attention_ms,
                 _near(head, 1 if p.kind == "prefill" else p.batch), source)
        for p in points
        if (p.kind == "mixed")
        or (p.kind == "decode" and (p.batch, p.context) in decode)
        or (p in single and (p.tokens, p.context) in prefill)
    )  # fmt: skip


def _near(head: dict[int, float], rows: int) -> float:
    return head[min(head, key=lambda size: abs(size - rows))] if head else 0.0

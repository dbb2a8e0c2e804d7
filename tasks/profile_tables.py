"""Profiles: tables of layers with all that was measured beside them, as files and in the catalog.

A profile file is Parquet: one row per point with the columns COLUMNS, and under the key `coral` of
its metadata a JSON object with the GPU, the model's shapes, links, whole-engine runs and
provenance.
A CSV has the same columns and nothing beside; its GPU and model must be known to the catalog.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from catalog.store import Catalog
from catalog.writes import ProfileRows, write_measured
from planner.errors import MissingProfileError, UnknownNameError
from planner.known import Known
from planner.perf.allreduce import AllReduce
from planner.perf.grids import Line
from planner.perf.model import PerformanceModel
from planner.perf.repair import Repaired, repair
from planner.perf.serving import Loop, loop_figures
from planner.perf.tables import LayerRow
from planner.types import GpuSpec, Link, ModelSpec, NodeClass
from tasks.profile_file import Measurements, ProfileFileError, read_measurements

COLUMNS: dict[str, Any] = {
    "model": pl.String, "gpu": pl.String, "tp": pl.Int64, "dtype": pl.String, "moe_ep": pl.Int64,
    "phase": pl.String, "batch": pl.Int64, "tokens": pl.Int64, "context": pl.Int64,
    "layer_ms": pl.Float64, "linear_ms": pl.Float64, "attn_ms": pl.Float64, "comm_ms": pl.Float64,
    "head_ms": pl.Float64, "source": pl.String,
}  # fmt: skip
NEEDED = [name for name in COLUMNS if name not in {"layer_ms", "comm_ms", "moe_ep", "source"}]
FORMAT = "coral-profile-1"


@dataclass(frozen=True)
class EnginePair:
    """A run of the whole engine beside what the tables say without overhead."""

    tp: int
    layers: int
    concurrency: int
    prompt: int
    output: int
    ttft_ms: float
    measured_tpot_ms: float
    predicted_tpot_ms: float
    measured_rps: float
    predicted_rps: float


@dataclass(frozen=True)
class Profile:
    """One model, dtype and GPU."""

    gpu: GpuSpec
    model: ModelSpec
    tables: Mapping[int, Repaired]  # by tensor parallel size
    source: str
    all_reduce: tuple[tuple[int, int, float], ...] = ()  # size, bytes, ms
    hop: tuple[tuple[int, float], ...] = ()  # bytes, ms
    engine: tuple[EnginePair, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(len(table.rows) for table in self.tables.values())


def profile_of(found: Measurements, name: str, gpu: GpuSpec) -> Profile:
    """Tables of raw points.

    Raises MissingProfileError or NoisyProfileError: points that contradict each other.
    """
    model = found.model(name)
    tables = {
        size: repair(f"{name} {model.dtype} on {gpu.name} TP{size}", found.rows(model, size))
        for size in found.sizes
    }
    reduces = tuple((row.tp, row.bytes, row.ms) for row in found.links.all_reduce)
    machine = found.machine
    return Profile(
        gpu=gpu,
        model=model,
        tables=tables,
        source=found.source,
        all_reduce=reduces,
        hop=tuple((row.bytes, row.ms) for row in found.links.hop),
        engine=tuple(_engine_pairs(found, model, gpu, tables, reduces)),
        provenance={
            **machine.model_dump(), "backend": found.backend, "kernels": found.kernels,
            "clocks_mhz": found.clocks_mhz, "rates": found.rates, "grids": found.grids,
            "hop_backend": found.links.hop_backend, "complete": found.complete,
            "notes": found.notes,
        },
    )  # fmt: skip


def performance_of(
    gpu: GpuSpec, model: ModelSpec, tables: Mapping[int, Sequence[LayerRow]],
    all_reduce: Sequence[tuple[int, int, float]],
) -> PerformanceModel:  # fmt: skip
    """A performance model of these tables alone."""
    rows = {
        (model.name, model.dtype, gpu.profile_name, size): list(found)
        for size, found in tables.items()
    }
    sizes = {size for size, _, _ in all_reduce}
    lines = {
        (gpu.profile_name, size): Line.of(
            [float(b) for s, b, _ in all_reduce if s == size],
            [ms for s, _, ms in all_reduce if s == size],
        )
        for size in sizes
    }
    return PerformanceModel(rows, {}, AllReduce(lines, {}), {})


def _engine_pairs(
    found: Measurements, model: ModelSpec, gpu: GpuSpec, tables: Mapping[int, Repaired],
    all_reduce: Sequence[tuple[int, int, float]],
) -> list[EnginePair]:  # fmt: skip
    known = performance_of(gpu, model, {s: t.rows for s, t in tables.items()}, all_reduce)
    pairs = []
    for run in found.serving:
        if run.tp not in tables:
            continue
        node = NodeClass(f"{gpu.name} x{run.tp}", gpu, run.tp, Link.PCIE, 1.0, 1.0)
        shallow = with_layers(model, run.layers)
        loop = Loop(run.concurrency, run.prompt, run.output)
        said = loop_figures(known, shallow, node, run.tp, loop, 0.0)
        pairs.append(
            EnginePair(
                run.tp, run.layers, run.concurrency, run.prompt, run.output, run.ttft_ms,
                run.tpot_ms, said.tpot_ms, run.throughput_rps, said.throughput_rps,
            )
        )  # fmt: skip
    return pairs


def with_layers(model: ModelSpec, layers: int) -> ModelSpec:
    """The same layers, another number of them."""
    return ModelSpec(**{**asdict(model), "layers": layers})


def write_profile_file(profile: Profile, path: Path) -> None:
    """As a whole or not at all."""
    frame = pl.DataFrame(
        [
            (profile.model.name, profile.gpu.profile_name, size, profile.model.dtype,
             int(profile.model.is_moe), row.phase, row.batch, row.tokens, row.context,
             row.linear_ms + row.attention_ms, row.linear_ms, row.attention_ms, 0.0, row.head_ms,
             row.source)
            for size, table in sorted(profile.tables.items())
            for row in table.rows
        ],
        schema=COLUMNS, orient="row",
    )  # fmt: skip
    beside = {
        "format": FORMAT,
        "gpu": asdict(profile.gpu),
        "model": asdict(profile.model),
        "all_reduce": profile.all_reduce,
        "hop": profile.hop,
        "engine": [asdict(pair) for pair in profile.engine],
        "source": profile.source,
        "provenance": dict(profile.provenance),
    }
    table = frame.to_arrow()
    table = table.replace_schema_metadata({b"coral": json.dumps(beside).encode()})
    draft = path.with_suffix(".draft")
    pq.write_table(table, draft)
    draft.replace(path)


def read_profile(path: Path, known: Known, gpu: str | None, name: str | None) -> Profile:
    """Of a profile file, a CSV, or a file of raw points (*.json).

    Raises ProfileFileError, UnknownNameError, MissingProfileError.
    """
    if not path.is_file():
        raise ProfileFileError(f"no file {path}")
    if path.suffix == ".json":
        found = read_measurements(path)
        return profile_of(found, name or path.stem, gpu_named(gpu or "", known, found))
    frame, beside = _frame(path)
    for column in NEEDED:
        if column not in frame.columns:
            raise ProfileFileError(
                f"{path} lacks the column {column!r}; a profile has {', '.join(NEEDED)}"
            )
    _refuse_mixed(path, frame)
    card = GpuSpec(**beside["gpu"]) if beside else _known_gpu(frame, known)
    model = ModelSpec(**beside["model"]) if beside else _known_model(frame, known)
    tables = {}
    for size in sorted(set(frame["tp"].to_list())):
        label = f"{model.name} {model.dtype} on {card.name} TP{size}"
        tables[size] = repair(label, _rows(path, frame.filter(pl.col("tp") == size)))
    return Profile(
        gpu=card,
        model=model,
        tables=tables,
        source=str(beside.get("source", f"imported from {path.name}")),
        all_reduce=tuple((int(s), int(b), float(ms)) for s, b, ms in beside.get("all_reduce", ())),
        hop=tuple((int(b), float(ms)) for b, ms in beside.get("hop", ())),
        engine=tuple(EnginePair(**pair) for pair in beside.get("engine", ())),
        provenance=beside.get("provenance", {"file": path.name}),
    )


def gpu_named(name: str, known: Known, found: Measurements) -> GpuSpec:
    """The catalog's GPU type of that name, or a new one with what was measured."""
    if name in known.gpus:
        return known.gpus[name]
    return found.gpu(name or found.machine.name)


def import_profile(
    catalog: Catalog, profile: Profile, now: datetime, replace: bool = False
) -> None:
    """Take it into the catalog, in place of earlier tables of the same.

    `replace` says that its GPU and its model's shapes are to be believed, not what is known.
    """
    rows = ProfileRows(
        gpu=profile.gpu,
        model=profile.model,
        layers={
            size: [
                (r.phase, r.batch, r.tokens, r.context, r.linear_ms, r.attention_ms, 0.0,
                 r.head_ms, r.source)
                for r in table.rows
            ]
            for size, table in profile.tables.items()
        },
        all_reduce=profile.all_reduce,
        hop=profile.hop,
        engine=[
            (p.tp, p.prompt, p.output, p.concurrency, p.ttft_ms, p.measured_tpot_ms,
             p.predicted_tpot_ms, p.layers, p.measured_rps, p.predicted_rps)
            for p in profile.engine
        ],
        lifted={size: len(table.lifted) for size, table in profile.tables.items()},
        outliers={size: len(table.outliers) for size, table in profile.tables.items()},
        source=profile.source,
        provenance=profile.provenance,
    )  # fmt: skip
    with catalog.write() as connection:
        write_measured(connection, rows, now, replace)


def _frame(path: Path) -> tuple[pl.DataFrame, dict[str, Any]]:
    try:
        if path.suffix == ".csv":
            return pl.read_csv(path, infer_schema_length=None), {}
        table = pq.read_table(path)
        beside = json.loads((table.schema.metadata or {}).get(b"coral", b"{}"))
        if beside and beside.get("format") != FORMAT:
            raise ProfileFileError(f"{path} is a profile of another Coral ({beside['format']})")
        found = pl.from_arrow(table)
        assert isinstance(found, pl.DataFrame)
        return found, beside
    except (pl.exceptions.PolarsError, pa.ArrowException, ValueError, OSError) as error:
        raise ProfileFileError(
            f"{path} is neither a profile (Parquet) nor a CSV ({str(error).splitlines()[0]})"
        ) from error


def _refuse_mixed(path: Path, frame: pl.DataFrame) -> None:
    if frame.is_empty():
        raise ProfileFileError(f"{path} has no rows")
    for column in ("model", "gpu", "dtype"):
        values = sorted({str(value) for value in frame[column].to_list()})
        if len(values) > 1:
            raise ProfileFileError(
                f"{path} has several values of {column} ({', '.join(values[:3])}); one file holds "
                "one profile"
            )


def _known_gpu(frame: pl.DataFrame, known: Known) -> GpuSpec:
    name = str(frame["gpu"][0])
    for gpu in known.gpus.values():
        if name in {gpu.name, gpu.profile_name}:
            return gpu
    raise UnknownNameError("GPU", name, known.gpus, "the profile")


def _known_model(frame: pl.DataFrame, known: Known) -> ModelSpec:
    name, dtype = str(frame["model"][0]), str(frame["dtype"][0])
    if name not in known.models:
        raise UnknownNameError("model", name, known.models, "the profile")
    model = known.models[name]
    if model.dtype != dtype:
        raise MissingProfileError(
            f"the profile has {name} in {dtype}, the catalog in {model.dtype}; sizes differ"
        )
    return model


def _rows(path: Path, frame: pl.DataFrame) -> list[LayerRow]:
    numbers = ["batch", "tokens", "context", "linear_ms", "attn_ms", "head_ms"]
    found = []
    for number, row in enumerate(frame.iter_rows(named=True), start=1):
        for name in numbers:
            if not isinstance(row[name], int | float):
                raise ProfileFileError(f"{path}, row {number}: {name} is {row[name]!r}, no number")
        if row["phase"] not in {"prefill", "decode", "mixed"}:
            raise ProfileFileError(
                f"{path}, row {number}: phase {row['phase']!r}; prefill, decode or mixed"
            )
        source = str(row.get("source") or f"imported from {path.name}")
        found.append(
            LayerRow(row["phase"], int(row["batch"]), int(row["tokens"]), int(row["context"]),
                     float(row["linear_ms"]), float(row["attn_ms"]), float(row["head_ms"]), source)
        )  # fmt: skip
    return found

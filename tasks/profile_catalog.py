"""Profiles in the catalog: imported, listed, calibrated on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from catalog import reads, writes
from catalog.seed import import_seed
from catalog.store import Catalog
from planner.errors import MissingProfileError, UnknownNameError
from planner.known import Known
from planner.perf.calibrate import Fit, Tables, fit_roofline
from planner.perf.model import PerformanceModel
from planner.perf.tables import LayerRow
from planner.types import GpuSpec, ModelSpec
from tasks.aiconfigurator import AiconfiguratorError, profile_from
from tasks.coral_task import coral_task
from tasks.home import open_catalog
from tasks.inputs import performance_model, read_known
from tasks.profile_tables import Profile, import_profile, read_profile


@dataclass(frozen=True)
class EngineCheck:
    """A run of the whole engine beside the tables with the engine's overhead."""

    prompt: int
    output: int
    concurrency: int
    measured_tpot_ms: float
    predicted_tpot_ms: float
    measured_rps: float | None
    predicted_rps: float | None
    layers: int | None
    split: str

    @property
    def tpot_error(self) -> float:
        return self.predicted_tpot_ms / self.measured_tpot_ms - 1.0

    @property
    def throughput_error(self) -> float | None:
        if self.measured_rps is None or self.predicted_rps is None:
            return None
        return self.predicted_rps / self.measured_rps - 1.0


@dataclass(frozen=True)
class TableView:
    """One table with what it can be compared with."""

    model: ModelSpec
    gpu: GpuSpec
    tp: int
    rows: tuple[LayerRow, ...]
    performance: PerformanceModel
    overhead_ms: float
    engine: tuple[EngineCheck, ...]
    source: str


def known_of(catalog: Catalog) -> Known:
    """What the catalog knows, seeded first where it is empty."""
    with catalog.write() as connection:
        import_seed(connection)
    with catalog.read() as connection:
        return read_known(connection)


def import_file(
    home: str | None, path: Path, gpu: str | None, name: str | None, now: datetime
) -> Profile:
    """Take a file's profile into the catalog; nothing of it where it is wrong."""
    catalog = open_catalog(home)
    profile = read_profile(path, known_of(catalog), gpu, name)
    import_profile(catalog, profile, now)
    catalog.publish(force=True)
    return profile


def import_system(
    home: str | None, system: str, gpu: str | None, name: str | None, tp: tuple[int, ...],
    now: datetime,
) -> Profile:  # fmt: skip
    """Take a known model's tables on a system of aiconfigurator-core into the catalog.

    Raises UnknownNameError, AiconfiguratorError.
    """
    catalog = open_catalog(home)
    known = known_of(catalog)
    if name is None or gpu is None:
        raise AiconfiguratorError(
            f"say which model (--name) and under which GPU type (--gpu) {system} is to be filed"
        )
    if name not in known.models:
        raise UnknownNameError("model", name, known.models)
    card = next((one for one in known.gpus.values() if gpu in {one.name, one.profile_name}), None)
    profile = profile_from(system, known.models[name], card, gpu, tp)
    import_profile(catalog, profile, now)
    catalog.publish(force=True)
    return profile


def list_tables(home: str | None) -> tuple[list[str], list[tuple[object, ...]]]:
    """Every table, one's own first."""
    catalog = open_catalog(home)
    known_of(catalog)
    with catalog.read() as connection:
        return reads.read_table_list(connection)


def read_table(home: str | None, model: str, gpu: str, tp: int) -> TableView:
    """One table. Raises UnknownNameError or MissingProfileError."""
    catalog = open_catalog(home)
    known = known_of(catalog)
    card = gpu_of(known, gpu)
    if model not in known.models:
        raise UnknownNameError("model", model, known.models)
    with catalog.read() as connection:
        performance = performance_model(reads.read_performance(connection))
        engine = reads.read_engine_points(connection, model, card.profile_name, tp)
    shapes = known.models[model]
    rows = performance.rows.get((model, shapes.dtype, card.profile_name, tp))
    if not rows:
        raise MissingProfileError(
            f"no measured table of {model} on {card.name} at tensor parallel size {tp}; "
            "`coral profile show` lists those there are"
        )
    overhead = performance.overhead_ms(card, model)  # as plans have it
    checks = tuple(_with_overhead(EngineCheck(*e), overhead) for e in engine)
    return TableView(shapes, card, tp, tuple(rows), performance, overhead, checks, rows[0].source)


def calibrate(home: str | None, gpu: str, scope: str, save: bool) -> tuple[GpuSpec, str, Fit]:
    """Fit the roofline of a GPU on its tables of dense or of MoE layers.

    Raises MissingProfileError: nothing of it is measured.
    """
    catalog = open_catalog(home)
    known = known_of(catalog)
    card = gpu_of(known, gpu)
    with catalog.read() as connection:
        performance = performance_model(reads.read_performance(connection))
    dtype, tables = _tables(performance, known, card, scope)
    if not tables:
        raise MissingProfileError(
            f"no {scope} layer of {card.name} is measured; profile a model on it first"
        )
    fit = fit_roofline(card, known.models, tables, f"fitted on {len(tables)} tables")
    if save:
        with catalog.write() as connection:
            found = fit.calibration
            factors = (
                found.compute_efficiency, found.bandwidth_efficiency, found.fixed_overhead_us
            )  # fmt: skip
            writes.write_calibration(
                connection, card.profile_name, scope, dtype, factors, found.source
            )
        catalog.publish(force=True)
    return card, dtype, fit


def gpu_of(known: Known, name: str) -> GpuSpec:
    """By market or profile name. Raises UnknownNameError."""
    for gpu in known.gpus.values():
        if name in {gpu.name, gpu.profile_name}:
            return gpu
    raise UnknownNameError("GPU", name, known.gpus)


def _tables(
    performance: PerformanceModel, known: Known, gpu: GpuSpec, scope: str
) -> tuple[str, Tables]:
    """Tables of a GPU in its most measured dtype."""
    by_dtype: dict[str, dict[tuple[str, int], Sequence[LayerRow]]] = {}
    for (model, dtype, profile, tp), rows in performance.rows.items():
        shapes = known.models.get(model)
        if shapes is None or shapes.dtype != dtype or profile != gpu.profile_name:
            continue
        if shapes.is_moe == (scope == "moe"):
            by_dtype.setdefault(dtype, {})[model, tp] = rows
    if not by_dtype:
        return "bf16", {}
    dtype = max(by_dtype, key=lambda d: (sum(len(rows) for rows in by_dtype[d].values()), d))
    return dtype, by_dtype[dtype]


def _with_overhead(check: EngineCheck, overhead_ms: float) -> EngineCheck:
    """Predictions are stored without overhead; every step has one."""
    tpot = check.predicted_tpot_ms + overhead_ms
    rps = check.predicted_rps
    if rps is not None:
        step = 1e3 * check.concurrency / ((check.output + 1.0) * rps)
        rps = rps * step / (step + overhead_ms)
    return replace(check, predicted_tpot_ms=tpot, predicted_rps=rps)


def median_pct(values: Sequence[float]) -> float | None:
    """Of absolute relative errors; None without any."""
    return float(100.0 * np.median(np.abs(values))) if len(values) else None


import_profile_task = coral_task("import-profile", import_profile)

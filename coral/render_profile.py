"""What `coral profile` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from coral.console import make_console
from tasks.profile_catalog import EngineCheck, TableView, median_pct
from tasks.profile_tables import EnginePair, Profile

if TYPE_CHECKING:
    from flows.profile_gpu import ProfileResult
    from planner.perf.calibrate import Fit
    from planner.types import GpuSpec

SHOWN = 8


def profiles_summary(result: ProfileResult) -> dict[str, Any]:
    """The JSON object of a measurement."""
    return {
        "profiles": [
            {**profile_summary(profile), "file": str(file)}
            for profile, file in zip(result.profiles, result.files, strict=True)
        ]
    }


def profile_summary(profile: Profile) -> dict[str, Any]:
    """The JSON object of one profile."""
    seen = profile.provenance
    return {
        "model": profile.model.name,
        "dtype": profile.model.dtype,
        "gpu": profile.gpu.name,
        "tensor_parallel_sizes": sorted(profile.tables),
        "rows": profile.rows,
        "lifted": [text for table in profile.tables.values() for text in table.lifted],
        "outliers": [text for table in profile.tables.values() for text in table.outliers],
        "notes": _notes(profile),
        "engine_runs": [asdict(pair) for pair in profile.engine],
        "rates": seen.get("rates"),
        "complete": seen.get("complete", True),
        "source": profile.source,
    }


def print_profiles(result: ProfileResult) -> None:
    """What was measured, and where it is."""
    for profile, file in zip(result.profiles, result.files, strict=True):
        print_imported(profile)
        make_console().print(f"Kept in {file}; `coral library build` uses it from now on.")


def print_imported(profile: Profile) -> None:
    """One profile, with what was repaired of it."""
    console = make_console()
    sizes = ", ".join(f"TP{size}" for size in sorted(profile.tables))
    console.print(
        f"{profile.model.name} {profile.model.dtype} on {profile.gpu.name}: {profile.rows} points "
        f"({sizes}), {profile.source}."
    )
    rates = profile.provenance.get("rates")
    if rates:
        console.print(
            f"Matrix product {rates['tflops']:.4g} TFLOP/s, copy {rates['memory_gbyte_per_s']:.4g} "
            "GB/s."
        )
    for what, texts in (
        ("lifted to what less work took", [t for x in profile.tables.values() for t in x.lifted]),
        ("outliers", [t for x in profile.tables.values() for t in x.outliers]),
        ("notes", _notes(profile)),
    ):
        if texts:
            more = f"; {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
            console.print(f"{len(texts)} {what}: {'; '.join(texts[:SHOWN])}{more}.")
    if profile.engine:
        _print_pairs(console, profile.engine)


def table_summary(view: TableView) -> dict[str, Any]:
    """The JSON object of one table."""
    return {
        "model": view.model.name,
        "dtype": view.model.dtype,
        "gpu": view.gpu.name,
        "tensor_parallel_size": view.tp,
        "source": view.source,
        "engine_overhead_ms": round(view.overhead_ms, 4),
        "tpot_error_median_pct": median_pct([c.tpot_error for c in view.engine]),
        "throughput_error_median_pct": median_pct(_throughput_errors(view.engine)),
        "engine": [asdict(check) for check in view.engine],
        "rows": [asdict(row) for row in view.rows],
    }


def print_table(view: TableView) -> None:
    """Points of one table, then the whole engine beside it."""
    console = make_console()
    console.print(f"{view.model.name} {view.model.dtype} on {view.gpu.name} TP{view.tp}")
    console.print(f"Source: {view.source}")
    table = Table()
    for column in ("phase", "batch", "tokens", "context", "linear ms", "attention ms", "head ms"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for row in view.rows:
        table.add_row(
            row.phase, f"{row.batch}", f"{row.tokens}", f"{row.context}", f"{row.linear_ms:.4g}",
            f"{row.attention_ms:.4g}", f"{row.head_ms:.4g}",
        )  # fmt: skip
    console.print(table)
    if view.engine:
        _print_checks(console, view)


def fit_summary(found: tuple[GpuSpec, str, Fit]) -> dict[str, Any]:
    """The JSON object of a calibration."""
    gpu, dtype, fit = found
    factors = fit.calibration
    return {
        "gpu": gpu.name,
        "dtype": dtype,
        "models": list(fit.models),
        "rows": fit.rows,
        "compute_efficiency": round(factors.compute_efficiency, 4),
        "bandwidth_efficiency": round(factors.bandwidth_efficiency, 4),
        "fixed_overhead_us": round(factors.fixed_overhead_us, 2),
        "prefill_error_median_pct": fit.prefill_error_pct,
        "decode_error_median_pct": fit.decode_error_pct,
        "leave_one_model_out_error_pct": fit.lomo_error_pct,
    }


def print_fit(found: tuple[GpuSpec, str, Fit]) -> None:
    """Factors and errors in a sentence."""
    gpu, dtype, fit = found
    factors = fit.calibration
    alone = len(fit.models) == 1
    make_console().print(
        f"{gpu.name}, {dtype}: compute {factors.compute_efficiency:.3f}, bandwidth "
        f"{factors.bandwidth_efficiency:.3f}, {factors.fixed_overhead_us:.1f} us a layer, on "
        f"{fit.rows} rows of {', '.join(fit.models)}; median error {fit.prefill_error_pct:.1f}% "
        f"prefill, {fit.decode_error_pct:.1f}% decode, "
        + ("one model alone, so none left out." if alone else "")
        + ("" if alone else f"{fit.lomo_error_pct:.1f}% of a model left out.")
    )


def _print_pairs(console: Console, pairs: Sequence[EnginePair]) -> None:
    for pair in pairs:
        console.print(
            f"Whole engine, {pair.layers} layers, {pair.concurrency} requests of {pair.prompt} + "
            f"{pair.output}: TPOT {pair.measured_tpot_ms:.2f} ms, by the tables without overhead "
            f"{pair.predicted_tpot_ms:.2f} ms; {pair.measured_rps:.2f} requests/s, "
            f"{pair.predicted_rps:.2f}."
        )


def _print_checks(console: Console, view: TableView) -> None:
    table = Table(
        title=f"Whole engine beside the tables, with {view.overhead_ms:.3f} ms overhead per step",
        title_justify="left",
    )
    for column in ("layers", "in flight", "prompt", "output", "TPOT ms", "predicted", "error",
                   "requests/s", "predicted", "error", "split"):  # fmt: skip
        table.add_column(column, justify="right")
    for check in view.engine:
        error = check.throughput_error
        table.add_row(
            "" if check.layers is None else f"{check.layers}", f"{check.concurrency}",
            f"{check.prompt}", f"{check.output}", f"{check.measured_tpot_ms:.2f}",
            f"{check.predicted_tpot_ms:.2f}", f"{check.tpot_error:+.1%}",
            "" if check.measured_rps is None else f"{check.measured_rps:.2f}",
            "" if check.predicted_rps is None else f"{check.predicted_rps:.2f}",
            "" if error is None else f"{error:+.1%}", check.split,
        )  # fmt: skip
    console.print(table)


def _throughput_errors(checks: Sequence[EngineCheck]) -> list[float]:
    return [error for c in checks if (error := c.throughput_error) is not None]


def _notes(profile: Profile) -> list[str]:
    """What the measurement says of itself: smaller grids, gaps that were left."""
    found: list[str] = list(profile.provenance.get("notes", ()))
    for grid in profile.provenance.get("grids", ()):
        for part in ("decode", "prefill"):
            one = grid.get(part) or {}
            found += [f"TP{grid['tp']} {part}: {note}" for note in one.get("notes", ())]
            if one.get("open_gaps"):
                found.append(f"TP{grid['tp']} {part}: {one['open_gaps']} gaps not refined in time")
    return found

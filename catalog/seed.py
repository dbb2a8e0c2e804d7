"""Import the data that the product ships (catalog/seed/, sources in its README).

The importer judges every price itself: what it cannot trust is kept, marked with the reason, and
never planned with.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import duckdb
import polars as pl

from catalog.errors import SeedError

# The day the snapshot's rows were put together; their own dates are in the source column.
SNAPSHOT_AT = datetime(2026, 11, 29, tzinfo=UTC)
LENGTHS = {"azure2023_conv", "azure2023_code"}
PRICE_ROUNDING_USD = 1e-4  # sources round spot prices to four decimals
TRACES = ("azure2023_conv", "azure2023_code")
# What makes a row of each table itself: a home that has it keeps its own.
KEYS: dict[str, tuple[str, ...]] = {
    "gpu": ("gpu",),
    "model": ("model",),
    "instance_type": ("cloud", "instance_type"),
    "layer_profile": (
        "model", "dtype", "gpu_profile", "tensor_parallel_size", "expert_parallel_size", "phase",
        "batch", "tokens", "context",
    ),
    "calibration": ("gpu_profile", "scope", "dtype"),
    "all_reduce": ("gpu_profile", "tensor_parallel_size", "message_bytes"),
    "all_reduce_fit": ("gpu_profile", "tensor_parallel_size", "source"),
    "engine_point": (
        "model", "gpu_profile", "tensor_parallel_size", "input_tokens", "output_tokens",
        "concurrency",
    ),
    "offer": ("observed_at", "domain", "zone", "instance_type", "market"),
    "availability": ("observed_at", "level", "domain", "instance_type"),
    "length_distribution": ("name",),
    "demand": ("trace", "minute"),
    "demand_history": ("series", "window_start"),
}  # fmt: skip


def seed_folder() -> Path:
    """Where the shipped data lies."""
    return Path(str(resources.files("catalog") / "seed"))


def import_seed(connection: duckdb.DuckDBPyConnection, folder: Path | None = None) -> bool:
    """Add the shipped rows that a home lacks, inside the caller's transaction; whether it looked.

    Once per content of the shipped files. Rows that are there stay as they are, also where the
    shipped ones differ.
    Raises SeedError: a file is missing or lacks a column.
    """
    where = folder or seed_folder()
    try:
        digest = _digest_of(where)
        if connection.execute("SELECT 1 FROM seed_import WHERE digest = ?", [digest]).fetchall():
            return False
        for table, frame in _frames(where).items():
            _insert_missing(connection, table, frame)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise SeedError(
            f"the shipped data in {where} is incomplete ({str(error).splitlines()[0]}); "
            "install Coral again"
        ) from error
    connection.execute("INSERT INTO seed_import VALUES (?, now())", [digest])
    return True


def judge_offers(offers: pl.DataFrame) -> pl.DataFrame:
    """One row per price, with the reason why it must not be used (null where it may).

    A row whose source marks its pair of prices as mismatched loses both, since nobody can tell
    which one is wrong.
    """
    shared: list[Any] = [
        "cloud",
        (pl.col("cloud") + ":" + pl.col("region")).alias("domain"),
        "zone",
        "instance_type",
        "gpu",
        "gpu_count",
        (pl.col("source") + " (" + pl.col("source_date").fill_null("undated") + ")").alias(
            "source"
        ),
    ]
    mismatched = pl.col("note").fill_null("").str.contains("SUSPECT")
    long = pl.concat(
        [
            offers.select(
                *shared,
                market=pl.lit(market),
                price_usd_per_hour=pl.col(column),
                on_demand=pl.col("on_demand_usd_h"),
                mismatched=mismatched,
            )
            for market, column in (("on_demand", "on_demand_usd_h"), ("spot", "spot_usd_h"))
        ]
    ).filter(pl.col("price_usd_per_hour").is_not_null())
    spot = pl.col("market") == "spot"
    price = pl.col("price_usd_per_hour")
    key = ["domain", "zone", "instance_type", "market"]
    return long.with_columns(
        rejected_because=pl.when(price.is_nan() | (price <= 0))
        .then(pl.lit("price is not positive"))
        .when(pl.col("mismatched"))
        .then(pl.lit("source marks the prices as mismatched"))
        .when(spot & (price > pl.col("on_demand") - PRICE_ROUNDING_USD))
        .then(pl.lit("spot not below on-demand"))
        .when(pl.struct(key).is_first_distinct().not_())
        .then(pl.lit("duplicate"))
        .otherwise(None)
    ).drop("on_demand", "mismatched")


def _frames(where: Path) -> dict[str, pl.DataFrame]:
    offers = judge_offers(pl.read_csv(where / "gpu_offers.csv", infer_schema_length=None))
    types = pl.read_csv(where / "instance_types.csv").with_columns(
        node_class=pl.col("gpu") + " x" + pl.col("gpu_count").cast(pl.String)
    )
    return {
        "gpu": _gpus(where),
        "model": _models(where),
        "instance_type": types,
        "layer_profile": _layer_profiles(where),
        "calibration": _calibrations(where),
        "all_reduce": _renamed(
            pl.read_csv(where / "allreduce.csv"),
            gpu="gpu_profile",
            tp="tensor_parallel_size",
            bytes="message_bytes",
            allreduce_ms="all_reduce_ms",
        ),
        "all_reduce_fit": _renamed(
            pl.read_csv(where / "comm_calibration.csv"),
            gpu="gpu_profile",
            tp="tensor_parallel_size",
            bus_bw_gbps="bus_bandwidth_gbyte_per_s",
            fitted_on="source",
        ),
        "engine_point": _engine_points(where),
        "offer": offers.with_columns(observed_at=pl.lit(SNAPSHOT_AT)),
        "availability": _availability(where),
        "length_distribution": _lengths(where),
        "demand": _demand(where),
        "demand_history": _demand_histories(where),
    }


def _gpus(where: Path) -> pl.DataFrame:
    specs = _renamed(
        pl.read_csv(where / "gpu_specs.csv"),
        gpu="profile_name",
        mem_bw_gbps="memory_bandwidth_gbyte_per_s",
        half_dense_tflops="half_tflops",
    )
    return pl.read_csv(where / "gpu_names.csv").join(specs, on="profile_name", how="inner")


def _models(where: Path) -> pl.DataFrame:
    return _renamed(
        pl.read_csv(where / "model_specs.csv"),
        hf_id="model",
        topk="experts_per_token",
        dtype_bytes="weight_bytes",
        moe_dtype_bytes="expert_weight_bytes",
        vllm_pp_bytes_per_token="hop_bytes_per_token",
    ).with_columns(
        pl.col("expert_weight_bytes").fill_null(0.0),
        dtype=pl.when(pl.col("expert_weight_bytes").is_between(0.4, 0.6))
        .then(pl.lit("mxfp4"))
        .when(pl.col("weight_bytes") == 1)
        .then(pl.lit("fp8"))
        .otherwise(pl.lit("bf16")),
    )


def _layer_profiles(where: Path) -> pl.DataFrame:
    frame = pl.read_parquet(where / "layer_profiles.parquet")
    text = ["model", "gpu", "dtype", "phase", "source"]
    return _renamed(
        frame.with_columns(
            pl.col(text).cast(pl.String),
            linear_ms=pl.col("gemm_ms") + pl.col("moe_ms") + pl.col("other_ms"),
        ),
        gpu="gpu_profile",
        tp="tensor_parallel_size",
        moe_ep="expert_parallel_size",
        attn_ms="attention_ms",
        comm_ms="communication_ms",
    )


def _calibrations(where: Path) -> pl.DataFrame:
    frame = pl.read_csv(where / "calibration.csv")
    return _renamed(
        frame.filter(pl.col("scope").is_in(["dense", "moe"]) & ~pl.col("gpu").str.contains(r"\*")),
        gpu="gpu_profile",
        fitted_on="source",
    ).with_columns(pl.col("source").fill_null("proposed, fitted on nothing"))


def _engine_points(where: Path) -> pl.DataFrame:
    systems = {
        "h100_sxm": "H100-SXM-80GB",
        "h200_sxm": "H200-SXM-141GB",
        "b200_sxm": "B200-SXM-180GB",
    }
    return _renamed(
        pl.read_csv(where / "measured_vllm_points.csv").with_columns(
            gpu_profile=pl.col("system").replace_strict(systems)
        ),
        tp="tensor_parallel_size",
        isl="input_tokens",
        osl="output_tokens",
        table_model_tpot_ms="predicted_tpot_ms",
    )


def _availability(where: Path) -> pl.DataFrame:
    return pl.read_csv(where / "availability_assumed.csv").with_columns(
        domain=pl.col("cloud") + ":" + pl.col("region"),
        source=pl.lit("assumed, not observed (availability_assumed.csv)"),
        observed_at=pl.lit(SNAPSHOT_AT),
    )


def _lengths(where: Path) -> pl.DataFrame:
    frame = pl.read_parquet(where / "demand_lengths.parquet").filter(
        pl.col("source").is_in(sorted(LENGTHS))
    )
    sides = [
        frame.filter(pl.col("kind") == kind).select(
            name="source", **{f"mean_{kind}": pl.col("mean"), f"p95_{kind}": pl.col("p95")}
        )
        for kind in ("input", "output")
    ]
    return (
        sides[0]
        .join(sides[1], on="name")
        .with_columns(source=pl.lit("AzurePublicDataset 2023, CC-BY 4.0"))
    )


def _demand(where: Path) -> pl.DataFrame:
    return pl.concat(
        [
            pl.read_parquet(where / f"demand_{trace}_1min.parquet").with_columns(
                trace=pl.lit(trace), source=pl.lit("AzurePublicDataset 2023, CC-BY 4.0")
            )
            for trace in TRACES
        ]
    )


def _demand_histories(where: Path) -> pl.DataFrame:
    """ServeGen's streams; their epoch is relative, so it begins at the epoch here too."""
    return pl.read_parquet(where / "demand_servegen_10min.parquet").select(
        series="servegen-" + pl.col("model"),
        window_start=pl.from_epoch("window_start_s"),
        window_minutes=pl.lit(10.0),
        requests_per_s=pl.col("rps"),
        source=pl.lit("ServeGen f891d118, Apache-2.0"),
    )


def _renamed(frame: pl.DataFrame, **names: str) -> pl.DataFrame:
    return frame.rename(names)


def _digest_of(where: Path) -> str:
    """Content hash of the shipped files."""
    digest = hashlib.sha256()
    for path in sorted(where.iterdir()):
        if path.suffix in {".csv", ".parquet"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _insert_missing(connection: duckdb.DuckDBPyConnection, table: str, frame: pl.DataFrame) -> None:
    """Insert rows whose key the table lacks; the frame may have more columns than it names."""
    names = [
        str(row[0])
        for row in connection.execute(
            "SELECT column_name FROM information_schema.columns "
            "WHERE table_name = ? AND table_catalog = current_database() "
            "ORDER BY ordinal_position",
            [table],
        ).fetchall()
        if row[0] in frame.columns
    ]
    rows = frame.select(names)
    connection.register("seed_rows", rows.to_arrow())
    columns = ", ".join(names)
    same = " AND ".join(f"k.{name} IS NOT DISTINCT FROM s.{name}" for name in KEYS[table])
    connection.execute(
        f"INSERT INTO {table} ({columns}) SELECT {columns} FROM seed_rows s "
        f"WHERE NOT EXISTS (SELECT 1 FROM {table} k WHERE {same})"
    )
    connection.unregister("seed_rows")

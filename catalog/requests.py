"""Shipped streams of requests: every arrival with its lengths, or rates with length histograms."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from catalog.errors import SeedError
from catalog.seed import seed_folder

ARRIVALS = ("azure2023_code", "azure2023_conv", "mooncake_conversation", "mooncake_synthetic")
# Series of `demand_history` whose prompts and outputs both have a histogram.
RATES = ("servegen-deepseek-r1", "servegen-m-large", "servegen-m-mid", "servegen-m-small")


def read_arrivals(name: str, folder: Path | None = None) -> pl.DataFrame:
    """timestamp_s (from the first request on), input_tokens, output_tokens of one of ARRIVALS."""
    return _read((folder or seed_folder()) / f"requests_{name}.parquet")


def read_length_histogram(
    name: str, kind: str, folder: Path | None = None
) -> tuple[list[float], list[float]]:
    """Edges in tokens, and the share of requests between them, of one of RATES.

    `kind` is input or output.
    """
    frame = _read((folder or seed_folder()) / "demand_lengths.parquet")
    source = name.replace("-", "_", 1)
    rows = frame.filter((pl.col("source") == source) & (pl.col("kind") == kind))
    return rows["hist_edges"][0].to_list(), rows["hist_p"][0].to_list()


def _read(path: Path) -> pl.DataFrame:
    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise SeedError(f"the shipped {path.name} cannot be read; install Coral again") from error

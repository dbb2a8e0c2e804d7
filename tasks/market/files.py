"""Offers from a CSV or Parquet file that somebody wrote."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import polars as pl

from catalog.market.pull import PRICED, PRICES, TYPES, Part, Pull
from planner.errors import InputError
from planner.types import Market

NEEDED = ("domain", "instance_type", "market", "price_usd_per_hour")
OPTIONAL = ("zone", "nodes", "gpu", "gpu_count", "vcpus")
MARKETS = (Market.SPOT.value, Market.ON_DEMAND.value)
NUMBERS = {"price_usd_per_hour": "a number of USD per hour", "nodes": "a whole number of nodes",
           "gpu_count": "a whole number", "vcpus": "a whole number"}  # fmt: skip


class MarketFileError(InputError):
    """A file of offers that cannot be used."""


def pull_file(path: Path, at: datetime, known_domains: Iterable[str] = ()) -> Pull:
    """All offers of a file; domains that it had before and has no more are empty now.

    Raises MarketFileError: not there, not readable, wrong columns or units, a value that is none.
    """
    frame = _checked(_read(path), path)
    prices = frame.select(
        observed_at=pl.lit(at),
        cloud=pl.col("domain").str.split(":").list.first(),
        domain="domain",
        zone="zone",
        instance_type="instance_type",
        market="market",
        price_usd_per_hour="price_usd_per_hour",
        nodes="nodes",
        source=pl.lit(path.name),
    ).cast(PRICES)  # type: ignore[arg-type]
    types = frame.select(
        pl.col("domain").str.split(":").list.first().alias("cloud"), *list(TYPES)[1:]
    ).cast(TYPES)  # type: ignore[arg-type]
    domains = sorted({*prices["domain"].to_list(), *known_domains})
    return Pull(
        feed=str(path),
        at=at,
        prices=prices,
        parts=[Part(domain, of, sure=True) for domain in domains for of in PRICED],
        types=types.drop_nulls(),
    )


def _read(path: Path) -> pl.DataFrame:
    if not path.is_file():
        raise MarketFileError(f"no such file of offers: {path}; check market.sources")
    try:
        if path.suffix.lower() == ".parquet":
            return pl.read_parquet(path)
        return pl.read_csv(path, infer_schema=False, truncate_ragged_lines=False)
    except (OSError, pl.exceptions.PolarsError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())[:200]
        raise MarketFileError(f"cannot read offers from {path}: {said}") from error


def _checked(frame: pl.DataFrame, path: Path) -> pl.DataFrame:
    """The columns that are used, typed; every value is what its column says."""
    unknown = [name for name in frame.columns if name not in (*NEEDED, *OPTIONAL)]
    missing = [name for name in NEEDED if name not in frame.columns]
    if missing or unknown:
        raise MarketFileError(f"{path}: {_columns(missing, unknown)}")
    frame = frame.with_columns(
        pl.lit(None, pl.String).alias(name) for name in OPTIONAL if name not in frame.columns
    )
    texts = [name for name in frame.columns if name not in NUMBERS]
    frame = frame.with_columns(pl.col(texts).cast(pl.String).str.strip_chars().replace("", None))
    for name, meaning in NUMBERS.items():
        frame = _numbers(frame, name, meaning, path)
    for name in ("domain", "instance_type", "market"):
        _refuse(frame, pl.col(name).is_null(), path, f"{name} is empty")
    wrong = ~pl.col("market").is_in(MARKETS)
    _refuse(frame, wrong, path, f"market must be {' or '.join(MARKETS)}", "market")
    named = pl.col("domain").str.contains(r"^[^:\s]+:[^:\s]+$")
    _refuse(frame, ~named, path, "domain must be like 'aws:us-east-1'", "domain")
    return frame


def _numbers(frame: pl.DataFrame, name: str, meaning: str, path: Path) -> pl.DataFrame:
    kind = pl.Float64 if name == "price_usd_per_hour" else pl.Int32
    text = pl.col(name).cast(pl.String).str.strip_chars().replace("", None)
    made = text.cast(kind, strict=False)
    _refuse(
        frame.with_columns(text.alias(name)),
        made.is_null() & pl.col(name).is_not_null(),
        path,
        f"{name} must be {meaning}",
        name,
    )
    return frame.with_columns(made.alias(name))


def _refuse(
    frame: pl.DataFrame, wrong: pl.Expr, path: Path, message: str, shown: str | None = None
) -> None:
    """Name the first line that is wrong."""
    found = frame.with_row_index("line", offset=2).filter(wrong)
    if found.height:
        row = found.row(0, named=True)
        got = f", got {row[shown]!r}" if shown else ""
        more = f" (and {found.height - 1} more lines)" if found.height > 1 else ""
        raise MarketFileError(f"{path}, line {row['line']}: {message}{got}{more}")


def _columns(missing: list[str], unknown: list[str]) -> str:
    """What is wrong with the columns, and which one was probably meant."""
    for name in unknown:
        if "price_usd_per_hour" in missing and any(
            word in name.lower() for word in ("price", "usd", "eur", "cost")
        ):
            return (
                f"column {name!r} is no price that Coral takes; give price_usd_per_hour, in USD "
                "per hour of the whole node"
            )
    if missing:
        near = difflib.get_close_matches(missing[0], unknown, n=1)
        hint = f"; rename {near[0]!r}" if near else ""
        return (
            f"column {missing[0]} is missing{hint}; offers need {', '.join(NEEDED)} and may have "
            f"{', '.join(OPTIONAL)}"
        )
    near = difflib.get_close_matches(unknown[0], (*NEEDED, *OPTIONAL), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join((*NEEDED, *OPTIONAL))}"
    return f"unknown column {unknown[0]!r}; {hint}"

"""From what a source answered to the rows that say something new (Polars; no database).

A row is accepted, rejected with a reason, or put aside with one. A rejected price is not offered;
of one that is put aside (a jump, until it is seen again; a duplicate) the price before it stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

import polars as pl

from catalog.market.pull import Limits, Part
from catalog.market.schema import ASIDE
from catalog.seed import PRICE_ROUNDING_USD

KEY = ["domain", "zone", "instance_type", "market"]
STATE = ["price_usd_per_hour", "nodes", "rejected_because", "listed"]
CLOCK_TOLERANCE = timedelta(minutes=5)


def new_rows(
    pulled: pl.DataFrame,
    stored: pl.DataFrame,
    known_types: pl.DataFrame,
    parts: Iterable[Part],
    at: datetime,
    limits: Limits,
) -> tuple[pl.DataFrame, dict[str, int]]:
    """Rows to append, and how many of the pulled ones were rejected by reason.

    `pulled` is as pull.PRICES; `stored` has KEY, observed_at and STATE of the newest rows of every
    offer (two that count, and the last of each kind put aside); `known_types` cloud, instance_type,
    gpu_count and stated_gpus (by the cloud itself; may be null).
    """
    pulled, stored = _zoned(pulled), _zoned(stored)
    judged = _judge(_dated(pulled, stored, at), stored, known_types, at, limits)
    reasons = judged.drop_nulls("rejected_because")["rejected_because"].value_counts()
    rejected = {reason: int(count) for reason, count in sorted(reasons.iter_rows())}
    gone = _withdrawn(pulled, stored, parts, at)
    rows = pl.concat(
        [_changed(judged, stored), _new_asides(judged, stored), gone], how="diagonal_relaxed"
    ).sort([*KEY, "observed_at"])
    zone = pl.when(pl.col("zone") == "").then(None).otherwise(pl.col("zone"))
    return rows.with_columns(zone=zone), rejected


def offered(stored: pl.DataFrame) -> pl.DataFrame:
    """The newest row that counts of every offer, where it is offered."""
    newest = stored.filter(~_aside()).sort("observed_at").unique(KEY, keep="last")
    return newest.filter(pl.col("listed") & pl.col("rejected_because").is_null())


def _dated(pulled: pl.DataFrame, stored: pl.DataFrame, at: datetime) -> pl.DataFrame:
    """Rows newer than what is stored; an offer's last known price is restated as of now.

    What is restated and says nothing new falls out later; it matters where the row before was put
    aside, or the offer was gone.
    """
    last = stored.group_by(KEY).agg(last_at=pl.col("observed_at").max())
    time = pl.col("observed_at")
    newest = time == time.max().over(KEY)
    known = pl.col("last_at").is_not_null() & (time <= pl.col("last_at"))
    return (
        pulled.with_columns(time.fill_null(at))
        .join(last, on=KEY, how="left")
        .with_columns(pl.when(newest & known).then(pl.lit(at)).otherwise(time).alias("observed_at"))
        .filter(pl.col("last_at").is_null() | (time > pl.col("last_at")))
        .drop("last_at")
    )


def _judge(
    rows: pl.DataFrame,
    stored: pl.DataFrame,
    known_types: pl.DataFrame,
    at: datetime,
    limits: Limits,
) -> pl.DataFrame:
    """The same rows with `rejected_because`; null where they may be used."""
    price = pl.col("price_usd_per_hour")
    per_gpu = price / pl.col("gpu_count").cast(pl.Float64).clip(lower_bound=1.0)
    most = limits.largest_usd_per_gpu_hour
    first = pl.struct([*KEY, "observed_at"]).is_first_distinct()
    judged = (
        rows.join(known_types, on=["cloud", "instance_type"], how="left")
        .join(_on_demand(rows, stored), on=["domain", "instance_type"], how="left")
        .with_columns(
            rejected_because=pl.when(price.is_null() | price.is_nan() | (price <= 0))
            .then(pl.lit("price is not positive"))
            .when(pl.col("gpu_count").is_null())
            .then(pl.lit("unknown instance type"))
            .when(pl.col("stated_gpus") != pl.col("gpu_count"))
            .then(pl.lit("the cloud says that the type has other GPUs"))
            .when(per_gpu > most)
            .then(pl.lit(f"more than {most:g} USD per GPU and hour: another unit?"))
            .when(pl.col("observed_at") > at + CLOCK_TOLERANCE)
            .then(pl.lit("observed in the future: a clock is off"))
            .when(
                (pl.col("market") == "spot")
                & (price > pl.col("on_demand_usd_per_hour") - PRICE_ROUNDING_USD)
            )
            .then(pl.lit("spot not below on-demand"))
            .when(~first)
            .then(pl.lit("duplicate"))
            .otherwise(None),
            listed=pl.lit(True),
        )
        .drop("gpu_count", "stated_gpus", "on_demand_usd_per_hour")
    )
    jumps = _jumps(judged, stored, limits.largest_jump)
    reason = pl.lit(f"jump beyond a factor of {limits.largest_jump:g}: taken in if seen again")
    good = judged.filter(pl.col("rejected_because").is_null())
    return pl.concat(
        [
            judged.filter(pl.col("rejected_because").is_not_null()),
            good.join(jumps, on=[*KEY, "observed_at"], how="anti"),
            good.join(jumps, on=[*KEY, "observed_at"], how="semi").with_columns(
                rejected_because=reason
            ),
        ]
    )


def _on_demand(rows: pl.DataFrame, stored: pl.DataFrame) -> pl.DataFrame:
    """The lowest on-demand price of every (domain, instance type): of now, else the last one."""
    columns = ["domain", "instance_type", "price_usd_per_hour"]
    market = pl.col("market") == "on_demand"
    now = rows.filter(market & (pl.col("price_usd_per_hour") > 0)).select(columns)
    before = offered(stored).filter(market).select(columns)
    both = pl.concat([now.with_columns(age=pl.lit(0)), before.with_columns(age=pl.lit(1))])
    return (
        both.sort("age", "price_usd_per_hour")
        .unique(["domain", "instance_type"], keep="first")
        .select("domain", "instance_type", on_demand_usd_per_hour="price_usd_per_hour")
    )


def _jumps(judged: pl.DataFrame, stored: pl.DataFrame, factor: float) -> pl.DataFrame:
    """KEY and time of the good rows that are far from both prices before them.

    A jump that is seen again is near the one before; after a single outlier the old price is near
    the one before that.
    """
    columns = [*KEY, "observed_at", "price_usd_per_hour"]
    may_compare = pl.col("rejected_because").is_null() | pl.col("rejected_because").str.starts_with(
        "jump"
    )
    before = stored.filter(may_compare & pl.col("listed")).select(columns)
    new = judged.filter(pl.col("rejected_because").is_null()).select(columns)
    line = pl.concat([before.with_columns(new=pl.lit(False)), new.with_columns(new=pl.lit(True))])
    price = pl.col("price_usd_per_hour")

    def far(steps: int) -> pl.Expr:
        ratio = price / price.shift(steps).over(KEY)
        return (ratio > factor) | (ratio < 1.0 / factor)

    return (
        line.sort([*KEY, "observed_at"])
        .with_columns(jump=far(1).fill_null(False) & far(2).fill_null(True))
        .filter(pl.col("new") & pl.col("jump"))
        .select([*KEY, "observed_at"])
    )


def _changed(judged: pl.DataFrame, stored: pl.DataFrame) -> pl.DataFrame:
    """Of the rows that count those that differ from the one before."""
    before = stored.filter(~_aside()).with_columns(new=pl.lit(False))
    line = pl.concat(
        [before, judged.filter(~_aside()).with_columns(new=pl.lit(True))], how="diagonal_relaxed"
    ).sort([*KEY, "observed_at"])
    same = pl.all_horizontal(
        pl.col(name).eq_missing(pl.col(name).shift(1).over(KEY)) for name in STATE
    )
    first = pl.col("observed_at").shift(1).over(KEY).is_null()
    return (
        line.with_columns(same=same & ~first)
        .filter(pl.col("new") & ~pl.col("same"))
        .drop("new", "same")
    )


def _new_asides(judged: pl.DataFrame, stored: pl.DataFrame) -> pl.DataFrame:
    """Rows put aside that are not there yet with the same price."""
    same = [*KEY, "rejected_because", "price_usd_per_hour"]
    return judged.filter(_aside()).join(
        stored.filter(_aside()), on=same, how="anti", nulls_equal=True
    )


def _withdrawn(
    pulled: pl.DataFrame, stored: pl.DataFrame, parts: Iterable[Part], at: datetime
) -> pl.DataFrame:
    """Offers that the whole lists of their domain and market do not have any more."""
    whole = pl.DataFrame(
        [(part.domain, part.of.value) for part in parts if part.seen],
        schema={"domain": pl.String, "market": pl.String},
        orient="row",
    )
    gone = (
        offered(stored)
        .join(whole, on=["domain", "market"], how="semi")
        .join(pulled.select(KEY), on=KEY, how="anti")
    )
    return gone.with_columns(
        observed_at=pl.lit(at),
        listed=pl.lit(False),
        cloud=pl.col("domain").str.split(":").list.first(),
        source=pl.lit("no longer listed"),
    )


def _aside() -> pl.Expr:
    reason = pl.col("rejected_because").fill_null("")
    return pl.any_horizontal(reason.str.starts_with(start) for start in ASIDE)


def _zoned(frame: pl.DataFrame) -> pl.DataFrame:
    """Zones without nulls, which joins would not match."""
    return frame.with_columns(pl.col("zone").fill_null(""))

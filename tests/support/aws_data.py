"""What the local AWS knows of prices: the shipped snapshot, as points in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache

import polars as pl

from catalog.seed import seed_folder

AGE = timedelta(hours=2)  # of the snapshot's spot prices when the tests begin


@dataclass(frozen=True)
class SpotPoint:
    """A spot price from a moment on."""

    region: str
    zone_id: str
    instance_type: str
    at: datetime
    price: float


@dataclass
class Snapshot:
    """Prices by region."""

    spot: list[SpotPoint]
    on_demand: dict[tuple[str, str], float]  # (region, instance type)
    zones: Mapping[str, tuple[str, ...]]  # zone ids by region

    @property
    def regions(self) -> list[str]:
        return sorted(self.zones)

    def copy(self) -> Snapshot:
        return Snapshot(list(self.spot), dict(self.on_demand), self.zones)

    def move_spot(self, instance_type: str, factor: float, at: datetime) -> None:
        newest = {
            (p.zone_id, p.instance_type): p
            for p in sorted(self.spot, key=lambda p: p.at)
            if p.instance_type == instance_type
        }
        self.spot += [
            SpotPoint(p.region, p.zone_id, p.instance_type, at, round(p.price * factor, 4))
            for p in newest.values()
        ]


@cache
def shipped_snapshot() -> Snapshot:
    """The AWS rows of the shipped prices; those that their source marks as mismatched included."""
    rows = pl.read_csv(seed_folder() / "gpu_offers.csv", infer_schema_length=None).filter(
        (pl.col("cloud") == "aws") & pl.col("zone").is_not_null()
    )
    began = datetime.now(UTC) - AGE
    spot = [
        SpotPoint(row["region"], row["zone"], row["instance_type"], began, row["spot_usd_h"])
        for row in rows.filter(pl.col("spot_usd_h").is_not_null()).iter_rows(named=True)
    ]
    on_demand = {
        (row["region"], row["instance_type"]): row["on_demand_usd_h"]
        for row in rows.filter(pl.col("on_demand_usd_h").is_not_null()).iter_rows(named=True)
    }
    zones: dict[str, set[str]] = {}
    for region, zone in rows.select("region", "zone").iter_rows():
        zones.setdefault(region, set()).add(zone)
    return Snapshot(spot, on_demand, {key: tuple(sorted(value)) for key, value in zones.items()})

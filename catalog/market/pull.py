"""What a source of prices answered, whichever it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

import polars as pl

TIME = pl.Datetime("us", "UTC")
# observed_at may be null: seen when Coral asked. Zone is null where the price is of the domain.
PRICES: dict[str, pl.DataType | type[pl.DataType]] = {
    "observed_at": TIME, "cloud": pl.String, "domain": pl.String, "zone": pl.String,
    "instance_type": pl.String, "market": pl.String, "price_usd_per_hour": pl.Float64,
    "nodes": pl.Int32, "source": pl.String,
}  # fmt: skip
# What a source says of the types that it prices; gpu is the market's name ('A100-80GB').
TYPES: dict[str, pl.DataType | type[pl.DataType]] = {
    "cloud": pl.String, "instance_type": pl.String, "gpu": pl.String, "gpu_count": pl.Int32,
    "vcpus": pl.Int32,
}  # fmt: skip


class Of(StrEnum):
    """Parts that a source answers by themselves, for a domain; prices are named by their market."""

    SPOT = "spot"
    ON_DEMAND = "on_demand"
    OFFERINGS = "offerings"
    FACTS = "facts"
    QUOTAS = "quotas"
    SCORES = "scores"


PRICED = (Of.SPOT, Of.ON_DEMAND)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of one domain: answered, or why not."""

    domain: str
    of: Of
    failed: str = ""  # one sentence; '' where it was answered
    sure: bool = False  # to list nothing is meant so

    @property
    def seen(self) -> bool:
        return not self.failed


@dataclass(frozen=True, slots=True)
class Score:
    """A placement score of a domain, for the types asked for together."""

    domain: str
    instance_types: tuple[str, ...]  # asked for
    concerns: tuple[str, ...]  # of them those that it is used for
    nodes: int
    score: int


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """A quota and what is used of it, in vCPUs."""

    domain: str
    family: str
    instance_types: str  # shell pattern
    market: str
    limit_vcpus: float
    used_vcpus: float  # by others
    own_vcpus: float  # by Coral's nodes


@dataclass(frozen=True, slots=True)
class Fact:
    """What a cloud says of an instance type."""

    cloud: str
    instance_type: str
    gpu: str
    gpu_count: int
    gpu_memory_gib: float
    vcpus: int
    memory_gib: float
    network_gbit_per_s: float | None


@dataclass(frozen=True)
class Pull:
    """All that one source answered at one time.

    Every seen part of prices lists all offers of its domain and market: what is not there is not
    offered any more.
    """

    feed: str  # the source's name
    at: datetime  # when it was asked
    prices: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=PRICES))
    parts: Sequence[Part] = ()
    types: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=TYPES))
    scores: Sequence[Score] = ()
    quotas: Sequence[QuotaRow] = ()
    facts: Sequence[Fact] = ()
    offerings: Sequence[tuple[str, str, str]] = ()  # (domain, zone, instance type)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a price must hold to be taken in."""

    largest_jump: float = 5.0  # times, up or down, against the last two prices of the same offer
    largest_usd_per_gpu_hour: float = 100.0  # ten times what the dearest GPU costs


@dataclass(frozen=True, slots=True)
class Landed:
    """What became of a pull."""

    feed: str
    prices: int  # rows that the source answered
    changed: int  # accepted rows that say something new
    withdrawn: int  # offers that are no longer listed
    rejected: dict[str, int]  # by reason, as of this pull
    parts: Sequence[Part]
    new_types: Sequence[str] = ()

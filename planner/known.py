"""What the catalog knows, for scenarios to be resolved against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.availability import NOTHING_KNOWN, Evidence
from planner.hop import Hop
from planner.types import GpuSpec, InstanceType, Lengths, Market, ModelSpec


@dataclass(frozen=True, slots=True)
class MarketRow:
    """One accepted price of one zone, as the catalog has it."""

    domain: str
    zone: str | None
    instance_type: str
    node_class: str
    market: Market
    price_usd_per_hour: float
    nodes: int | None = None  # that its source says there are


@dataclass(frozen=True, slots=True)
class Known:
    """What the catalog knows, for a scenario to be resolved against."""

    models: Mapping[str, ModelSpec]
    instance_types: Sequence[InstanceType]
    gpus: Mapping[str, GpuSpec]  # by market name
    lengths: Mapping[str, Lengths]
    trace_rps: Mapping[str, Sequence[float]]  # requests/s of every minute
    histories: Mapping[str, tuple[float, Sequence[float], float]]  # as DemandHistory.of takes them
    prices: Sequence[MarketRow]
    stock: Mapping[tuple[str, str, str], int]  # (level, domain, instance type) -> nodes
    evidence: Evidence = NOTHING_KNOWN  # of availability, beyond the assumed stock
    hops: Mapping[str, Hop] = field(default_factory=dict)  # measured, by profile of the GPU
    # By model: minutes that gateways saw, oldest first, and the requests/s of each.
    observed: Mapping[str, tuple[Sequence[int], Sequence[float]]] = field(default_factory=dict)

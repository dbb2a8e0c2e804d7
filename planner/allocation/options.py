"""What an operator may ask of a plan: settings of A0, and limits beyond least cost (A7 to A11)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from planner.types import Market, Offer


@dataclass(frozen=True, slots=True)
class Quota:
    """Most vCPUs of some instance types in some domains and one market (A7)."""

    vcpus: int
    domains: str = "*"  # shell pattern
    instance_types: str = "*"  # shell pattern: 'g6*'
    market: Market | None = None  # None counts spot and on-demand together

    def covers(self, offer: Offer) -> bool:
        return (
            offer.market is not Market.OWNED
            and self.market in {None, offer.market}
            and fnmatchcase(offer.domain, self.domains)
            and fnmatchcase(offer.instance_type, self.instance_types)
        )

    def describe(self) -> str:
        market = f"{self.market.value.replace('_', '-')} " if self.market else ""
        return f"quota of {self.vcpus} {market}vCPUs for {self.instance_types} in {self.domains}"


@dataclass(frozen=True, slots=True)
class ServiceRules:
    """What one workload asks for."""

    domains: frozenset[str] | None = None  # where it may be served; None: anywhere
    least_served: float = 0.0  # share of its demand that every plan must serve
    largest_domain_share: float = 1.0  # of its demand that one domain may serve
    origin: str | None = None  # domain from which its traffic comes; egress elsewhere is paid


@dataclass(frozen=True, slots=True)
class AllocationOptions:
    """Limits on the whole plan."""

    quotas: tuple[Quota, ...] = ()
    largest_spot_share: float = 1.0  # of all rented GPUs
    budget_usd_per_hour: float | None = None
    egress_usd_per_gib: Mapping[str, float] = field(default_factory=dict)  # by domain
    bytes_per_token: float = 4.0  # of text on the wire


@dataclass(frozen=True, slots=True)
class AllocationSettings:
    """Horizon and costs of change of A0, and when the solver stops."""

    horizon_hours: float = 1.0
    startup_minutes: float = 10.0  # a new node is paid for, but serves nothing, for so long
    drain_minutes: float = 2.0  # and so is one that is given back
    restart_minutes: float = 5.0  # what the nodes of a replica that ends lose on loading another
    relative_gap: float = 0.005
    deadline_s: float = 60.0
    solver: str = "columns"  # or 'full': the whole program in PuLP, the reference


ANYWHERE = ServiceRules()

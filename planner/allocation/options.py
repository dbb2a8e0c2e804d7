"""What an operator may ask of a plan beyond least cost (A7 to A11)."""

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


ANYWHERE = ServiceRules()

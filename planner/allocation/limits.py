"""Limits of a plan that can bind, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.allocation.options import Quota
from planner.types import Market, Offer, Workload


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of the plan that can bind, in words."""

    kind: str  # 'stock', 'owned', 'quota', 'spot share', 'budget', 'spread', 'least served'
    text: str
    amount: float  # the right-hand side, in the unit of the row
    unit: str
    step: float  # the least amount that one more node or request would need of it
    offer: Offer | None = None


def stock_limit(offer: Offer, stock: int) -> Limit:
    """A2 of an instance type in a domain, rented or owned; `offer` is one of its offers."""
    owned = offer.market is Market.OWNED
    whose = "owned " if owned else ""
    text = f"{whose}{offer.node_class} ({offer.instance_type}) in {offer.domain}"
    return Limit("owned" if owned else "stock", text, stock, "nodes", 1.0, offer)


def quota_limit(quota: Quota, offers: Sequence[Offer]) -> Limit:
    """A7."""
    least = min((offer.vcpus for offer in offers if quota.covers(offer)), default=1)
    return Limit("quota", quota.describe(), quota.vcpus, "vCPUs", least)


def spot_share_limit(share: float, rented: Sequence[Offer]) -> Limit:
    """A8."""
    text = f"at most {share:.0%} of the rented GPUs on spot"
    step = min((offer.gpus * (1.0 - share) for offer in rented), default=1.0)
    return Limit("spot share", text, 0.0, "GPUs", step)


def spread_limit(workload: Workload, share: float, domain: str) -> Limit:
    """A9."""
    amount = share * workload.demand_rps
    text = f"at most {share:.0%} of {workload.name} in one domain ({domain})"
    return Limit("spread", text, amount, "requests/s", 1e-4 * max(amount, 1e-9))


def budget_limit(budget_usd_per_hour: float, rented: Sequence[Offer]) -> Limit:
    """A10."""
    cheapest = min((offer.price_usd_per_hour for offer in rented), default=0.0)
    text = f"budget of ${budget_usd_per_hour:g}/h"
    return Limit("budget", text, budget_usd_per_hour, "USD/hour", cheapest)


def least_served_limit(workload: Workload, share: float) -> Limit:
    """A11, with a hair of slack: the same rounding that reads the served share back."""
    amount = (1.0 - share) * workload.demand_rps + 1e-7 * workload.demand_rps
    step = 1e-4 * max(workload.demand_rps, 1e-9)
    return Limit(
        "least served",
        f"at least {share:.0%} of {workload.name} served",
        amount,
        "requests/s",
        step,
    )

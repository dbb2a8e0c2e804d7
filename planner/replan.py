"""Plan again from where the fleet stands: change no more than pays for itself.

What runs is the start of the search; new nodes, nodes given back and replicas that end cost what
A0 says (A3), and the running plan gives way only where the new one serves more or saves enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from planner.allocation.plan import Plan
from planner.allocation.problem import (
    AllocationInput,
    NodeKey,
    RunningReplicas,
    StockKey,
    node_key,
    stock_key,
)
from planner.allocation.solve import keep_running
from planner.baselines.homo_joint import (
    better_of,
    plan_homo_joint,
    plan_never_worse,
    with_bound_of,
)
from planner.leases import Lease, held_nodes
from planner.types import Market, Offer, gpus_of

SERVES_MORE = 1e-4  # of the weighted demand


@dataclass(frozen=True)
class Replanned:
    """The plan to follow now, Homo-joint's beside it, and why."""

    plan: Plan
    homo_joint: Plan
    why: str
    moves: bool  # away from the running plan, or nothing ran


def from_fleet(
    data: AllocationInput, leases: Iterable[Lease], replicas: Mapping[tuple[str, str], int]
) -> AllocationInput:
    """The input with what runs: nodes held, and replicas by (template id, domain).

    Nodes that run stay one's own: a stock below them is raised to them, and where the market no
    longer offers their kind they stay at their launch price, with no others beside them.
    """
    running = [lease for lease in leases if lease.state.is_held]
    held = held_nodes(running)
    offers = {node_key(offer): offer for offer in data.offers}
    vcpus = {offer.instance_type: offer.vcpus for offer in data.offers}
    least: dict[StockKey, int] = {}
    for key, offer in offers.items():
        least[stock_key(offer)] = least.get(stock_key(offer), 0) + held.get(key, 0)
    offers = {
        key: replace(offer, stock=max(offer.stock, least[stock_key(offer)]))
        for key, offer in offers.items()
    }
    for lease in running:
        if lease.key not in offers:
            owned = lease.market is Market.OWNED
            offers[lease.key] = Offer(
                domain=lease.domain,
                instance_type=lease.instance_type,
                node_class=lease.node_class,
                market=lease.market,
                price_usd_per_hour=0.0 if owned else lease.price_usd_per_hour,
                stock=held[lease.key],
                stock_source="runs; the market no longer offers it",
                zone=lease.zone,
                gpus=gpus_of(lease.node_class),
                vcpus=vcpus.get(lease.instance_type, 0),
            )
    templates = {template.id: template for template in data.templates}
    return replace(
        data,
        offers=tuple(offer for _, offer in sorted(offers.items())),
        held=dict(sorted(held.items())),
        running=tuple(
            RunningReplicas(templates[key], domain, count)
            for (key, domain), count in sorted(replicas.items())
            if key in templates
        ),
    )


def without_more(
    data: AllocationInput, scarce: Set[tuple[str, str]], lacking: Set[NodeKey] = frozenset()
) -> AllocationInput:
    """The input with no nodes of these (domain, node class), or offers, but those that are held.

    What did not come is not to be planned on again.
    """
    return replace(
        data,
        offers=tuple(
            replace(offer, stock=data.held.get(node_key(offer), 0), stock_source="did not come")
            if (offer.domain, offer.node_class) in scarce or node_key(offer) in lacking
            else offer
            for offer in data.offers
        ),
    )


def replan(
    data: AllocationInput,
    replicas: Mapping[tuple[str, str], int],
    nodes: Mapping[NodeKey, int],
    least_saving_share: float,
) -> Replanned:
    """The running plan, or another one that serves more or saves at least that share of its cost.

    `replicas` and `nodes` are the plan that the fleet follows, empty where there is none.
    Raises SolverStoppedError: no plan before the deadline; what runs should stay.
    """
    running = keep_running(data, replicas, nodes) if replicas else None
    homo = plan_homo_joint(data)
    if running is None:
        why = "a plan for the fleet as it stands"
        return Replanned(plan_never_worse(data, homo), homo, why, moves=True)
    best = plan_never_worse(data, better_of(running, homo))
    tolerance = SERVES_MORE * max(1.0, data.weighted_demand)
    if running.weighted_shortfall - best.weighted_shortfall > tolerance:
        return Replanned(best, homo, "the new plan serves more", moves=True)
    saving = running.objective_usd - best.objective_usd
    if saving > least_saving_share * running.objective_usd:
        why = f"the new plan saves ${saving:.2f} over the horizon"
        return Replanned(best, homo, why, moves=True)
    kept = with_bound_of(data, running, best)
    return Replanned(kept, homo, "no other plan saves enough to move", moves=False)

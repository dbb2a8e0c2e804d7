"""A plan: what to run where, what it costs, what it serves and what stops it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.allocation.limits import Limit
from planner.allocation.problem import NodeKey, node_key
from planner.types import Offer, Template


@dataclass(frozen=True, slots=True)
class PlannedReplicas:
    """Replicas of one template in one domain and the load that they take together."""

    template: Template
    domain: str
    count: int
    load_rps: Mapping[str, float]  # requests/s by workload

    @property
    def utilization(self) -> float:
        """Share of the replicas' throughput that the load takes (A4)."""
        serves = self.template.serves
        return sum(rps / serves[name] for name, rps in self.load_rps.items()) / self.count


@dataclass(frozen=True, slots=True)
class PlannedNodes:
    """Nodes of one offer, and how many of them are not running yet."""

    offer: Offer
    count: int
    new: int

    @property
    def cost_usd_per_hour(self) -> float:
        return self.count * self.offer.price_usd_per_hour


@dataclass(frozen=True, slots=True)
class WorkloadService:
    """Demand and what the plan serves of it, requests/s."""

    workload: str
    demand_rps: float
    served_rps: float
    weight: float

    @property
    def short_rps(self) -> float:
        return self.demand_rps - self.served_rps

    @property
    def share(self) -> float:
        return self.served_rps / self.demand_rps if self.demand_rps else 1.0


@dataclass(frozen=True, slots=True)
class Binding:
    """A limit that leaves no room for one more node (or request)."""

    limit: Limit
    used: float  # of limit.amount
    worth: float  # of one more unit, in the linear relaxation
    worth_unit: str  # 'USD/hour' saved, or 'requests/s' (weighted) more served under shortfall


@dataclass(frozen=True, slots=True)
class ClassWorth:
    """What one more node of a class would be worth, in the domain where it is worth most."""

    node_class: str
    domain: str
    worth: float  # in the linear relaxation; zero where every domain has nodes left
    worth_unit: str  # as of Binding


@dataclass(frozen=True, slots=True)
class Worth:
    """Why a plan is not better: shadow prices of the linear relaxation."""

    binding: tuple[Binding, ...] = ()
    classes: tuple[ClassWorth, ...] = ()  # most valuable first


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer of one allocation."""

    replicas: tuple[PlannedReplicas, ...]
    nodes: tuple[PlannedNodes, ...]
    services: tuple[WorkloadService, ...]
    worth: Worth
    cost_usd_per_hour: float  # rent of the nodes
    egress_usd_per_hour: float
    objective_usd: float  # A0 over the horizon, initialisation and drains included
    bound_usd: float  # proven lower bound of the objective
    gap: float  # relative, the larger of the two steps
    proven: bool  # both steps ended within the gap asked for
    solve_s: float
    shortfall_gap: float = 0.0  # of the first step alone, relative to the weighted demand
    columns_seen: int = 0  # replicas of every template and domain that were priced
    columns_kept: int = 0  # columns of the largest integer program
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    history: tuple[tuple[float, float, float], ...] = ()  # s, shortfall, A0

    @property
    def binding(self) -> tuple[Binding, ...]:
        """Limits that leave no room, most valuable first."""
        return self.worth.binding

    @property
    def replica_counts(self) -> dict[tuple[str, str], int]:
        """Replicas by (template id, domain)."""
        return {(r.template.id, r.domain): r.count for r in self.replicas}

    @property
    def node_counts(self) -> dict[NodeKey, int]:
        """Nodes by offer."""
        return {node_key(n.offer): n.count for n in self.nodes}

    @property
    def weighted_shortfall(self) -> float:
        """Sum of weight x unserved requests/s: what scarcity minimises first."""
        return sum(service.weight * service.short_rps for service in self.services)

    @property
    def served_share(self) -> float:
        """Share of all requests/s that the plan serves."""
        demand = sum(service.demand_rps for service in self.services)
        return sum(service.served_rps for service in self.services) / demand if demand else 1.0

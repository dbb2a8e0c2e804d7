"""A fleet over days: replicas that start, drain and are lost, and the nodes that are paid for.

A plan's new replicas serve once their nodes have started; what it ends serves until then and
drains. Spot nodes that the market no longer has are lost at once, with their replicas: of a kind
the youngest replica's go first.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.allocation.plan import Plan
from planner.allocation.problem import NodeKey, node_key
from planner.replicas import ReplicaKey
from planner.types import Market, Offer
from simulator.fleet import Engine
from simulator.run import EventKind, FleetEvent, NewPlan

HOUR_S = 3600.0


@dataclass
class Instance:
    """One replica's life, in hours; `nodes` are its own, by offer."""

    name: str
    key: ReplicaKey
    begun: float
    nodes: Counter[NodeKey]
    engines: list[Engine]
    ready: float
    ended: float | None = None  # when it stopped taking requests
    lost: float | None = None  # when its nodes went


@dataclass
class FleetHistory:
    """What one planner's fleet did; grows as time goes on."""

    classes: Mapping[str, str]  # node class by instance type
    startup_hours: float
    instances: list[Instance] = field(default_factory=list)
    idle: Counter[NodeKey] = field(default_factory=Counter)  # held, of no replica
    plans: list[NewPlan] = field(default_factory=list)
    lost_nodes: int = 0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def alive(self) -> list[Instance]:
        return [i for i in self.instances if i.ended is None and i.lost is None]

    @property
    def nodes(self) -> Counter[NodeKey]:
        """Nodes held, without those that only drain."""
        return sum((i.nodes for i in self.alive), Counter(self.idle))

    @property
    def replicas(self) -> Counter[ReplicaKey]:
        return Counter(instance.key for instance in self.alive)

    def follow(
        self, plan: Plan, hours: float, engines_of: Mapping[ReplicaKey, Sequence[Engine]]
    ) -> None:
        """Start and end replicas so that they are the plan's.

        `engines_of` has the engines of one replica of every kind in the plan. The first plan's
        replicas serve from the beginning.
        """
        first = not self.instances and not self.plans
        ready = hours if first else hours + self.startup_hours
        wanted = plan.replica_counts
        free = Counter(plan.node_counts)
        by_key: dict[ReplicaKey, list[Instance]] = defaultdict(list)
        for instance in self.alive:
            by_key[instance.key].append(instance)
        for key, mine in by_key.items():
            for instance in mine[wanted.get(key, 0) :]:
                instance.ended = ready
        for instance in self.alive:  # its own nodes where they stay, others of their classes
            kept = instance.nodes & free
            free -= kept
            needs = Counter(self.classes[key[1]] for key in (instance.nodes - kept).elements())
            instance.nodes = kept + self._assign(needs, free, instance.key[1])
        templates = {planned.template.id: planned.template for planned in plan.replicas}
        for key, count in sorted(wanted.items()):
            for _ in range(count - len(by_key[key])):
                name = f"{key[0][:6]}-{key[1]}-{next(self._numbers)}"
                nodes = self._assign(Counter(dict(templates[key[0]].combination)), free, key[1])
                self.instances.append(
                    Instance(name, key, hours, nodes, _named(engines_of[key], name, key), ready)
                )
        self.idle = free
        self._route(ready, engines_of)

    def lose(self, offers: Sequence[Offer], stock: Mapping[NodeKey, int], hours: float) -> None:
        """Give up the spot nodes of which fewer can be had than are held."""
        held = self.nodes
        for offer in offers:
            key = node_key(offer)
            excess = held[key] - stock.get(key, 0) if offer.market is Market.SPOT else 0
            if excess <= 0:
                continue
            self.lost_nodes += excess
            spare = min(excess, self.idle[key])
            self.idle[key] -= spare
            excess -= spare
            for instance in reversed(self.alive):
                if excess <= 0:
                    break
                if gone := min(excess, instance.nodes[key]):
                    excess -= gone
                    instance.lost = hours
                    left = instance.nodes - Counter({key: gone})
                    self.idle += left  # its other nodes are still paid for

    def events(self) -> list[FleetEvent]:
        """Starts, drains and losses of all engines."""
        found = []
        for instance in self.instances:
            for engine in instance.engines:
                if instance.ready > 0.0:
                    found.append(
                        FleetEvent(instance.ready * HOUR_S, EventKind.STARTED, engine.name)
                    )
                if instance.ended is not None:
                    at = instance.ended * HOUR_S
                    found.append(FleetEvent(at, EventKind.DRAINED, engine.name))
                if instance.lost is not None:
                    at = max(instance.lost, instance.ready) * HOUR_S
                    found.append(FleetEvent(at, EventKind.DIED, engine.name))
        return found

    def engines(self) -> list[Engine]:
        return [engine for instance in self.instances for engine in instance.engines]

    def _assign(self, needs: Counter[str], free: Counter[NodeKey], domain: str) -> Counter[NodeKey]:
        """Free nodes of the domain for a replica's needs by class; on-demand ones first."""
        taken: Counter[NodeKey] = Counter()
        order = sorted(free, key=lambda key: (key[2] is Market.SPOT, key))
        for name, count in needs.items():
            mine = [key for key in order if key[0] == domain and self.classes[key[1]] == name]
            for key in mine:
                got = min(count, free[key])
                count -= got
                taken[key] += got
                free[key] -= got
        return +taken

    def _route(self, hours: float, engines_of: Mapping[ReplicaKey, Sequence[Engine]]) -> None:
        """Weights of the plan's own engines, by their place in the replica."""
        weights = {
            engine.name: engines_of[instance.key][place].weights
            for instance in self.alive
            for place, engine in enumerate(instance.engines)
        }
        self.plans.append(NewPlan(hours * HOUR_S, weights))


def _named(engines: Sequence[Engine], name: str, key: ReplicaKey) -> list[Engine]:
    return [
        replace(engine, name=f"{name}/{k}", group="-".join(key)) for k, engine in enumerate(engines)
    ]

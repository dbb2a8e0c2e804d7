"""The plans of one round: the first, and others where what was planned is not to be had."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime

from catalog import reads
from catalog.store import Catalog
from executor.apply import Caps
from executor.draft import DraftStore
from executor.lease_store import SqliteLeaseStore
from planner.allocation.problem import AllocationInput, NodeKey, node_key
from planner.errors import CoralError, InputError, SolverStoppedError
from planner.leases import Actions, Lease, LeaseKey, held_nodes, reconcile
from planner.replan import from_fleet, replan, without_more
from planner.replicas import Replica, ReplicaChanges, ReplicaKey, follow, standing
from planner.scenario import ScenarioSpec
from planner.succession import going_order, serving
from planner.types import Market, Offer
from tasks.allocation import conclude, fingerprint
from tasks.inputs import Inputs
from tasks.report import Decision
from tasks.transition import Transition


class UnmakeablePlanError(InputError):
    """A plan with nodes that no fleet of the scenario can make."""


@dataclass(frozen=True)
class Choice:
    """The plan that a round follows."""

    decision: Decision | None
    nodes: Mapping[NodeKey, int]
    replicas: Mapping[ReplicaKey, int]
    why: str
    stopped: bool = False


@dataclass
class Turn:
    """The plans of one round: the first, and others where what was planned is not to be had."""

    catalog: Catalog
    spec: ScenarioSpec
    inputs: Inputs
    store: SqliteLeaseStore | DraftStore
    now: datetime
    market: AllocationInput
    running: Sequence[Replica]
    hinted: Collection[str]  # leases
    scarce: Set[tuple[str, str]]  # (domain, node class) that did not come
    since: datetime  # what waits longer is late
    last: reads.StoredPlan | None
    routed: Collection[str] | None
    caps: Caps
    deploy: Callable[[Sequence[Replica]], None]
    draft: bool

    def __post_init__(self) -> None:
        self.name = self.inputs.scenario.name
        self.combinations = {t.id: t.combination for t in self.market.templates}
        self.lacking: frozenset[LeaseKey] = frozenset()  # offers without capacity just now
        self.plans = 0

    def plan(self) -> Actions:
        """From where the fleet stands.

        Raises UnmakeablePlanError: the plan to follow has nodes that are not to be had.
        SolverStoppedError: no plan before the deadline, and none from before.
        """
        leases = [x for x in self.store.all() if x.scenario == self.name]
        settled = [lease for lease in leases if lease.id not in self.hinted]
        allowed = [lease for lease in settled if _is_allowed(lease, self.spec)]
        running = standing(self.running, self.combinations, allowed)
        held = from_fleet(self.market, allowed, running)
        self.data = without_more(held, self.scarce, self.lacking)
        # A plan without what lacks just now is not that of this market: the next round plans anew.
        self.mark = fingerprint(without_more(self.market, frozenset(), self.lacking))
        self.choice = self._choose(held_nodes(settled))
        self.plans += 1
        offers = {node_key(offer): offer for offer in self.data.offers}
        _refuse_unmakeable(self.choice, offers, self.name)
        serve = serving(self.running, self.combinations, leases, self.routed)
        changes = _followed(
            self.running, self.choice.replicas, self.name, self.now, leases, self.hinted
        )
        changes = replace(changes, ended=tuple(going_order(self.data, serve, changes.ended)))
        models = {w.name: w.model.name for w in self.inputs.scenario.workloads}
        model_of = {t.id: models[t.workload] for t in self.market.templates if t.workload in models}
        ended = {replica.id for replica in changes.ended}
        freed = [replace(x, replica=None) if x.replica in ended else x for x in settled]
        actions = reconcile(
            self.choice.nodes, offers, freed, _ranks(changes, serve, model_of, settled)
        ).and_end([lease for lease in leases if lease.id in self.hinted])
        self.move = Transition(
            self.store, self.name, self.now, self.data, changes, actions, self.combinations,
            self.hinted,
            model_of, self.deploy, self.routed, self.since, self.caps,
        )  # fmt: skip
        return actions

    def instead(self, lacking: frozenset[LeaseKey]) -> Actions | None:
        """Another plan, without more of offers that have no capacity; None: leave it at that."""
        self.lacking |= lacking
        if self.plans >= self.spec.fleet.plans_per_round:
            return None
        before = self.choice  # what another plan cannot do either, this one says
        try:
            actions = self.plan()
        except CoralError:
            self.choice = before
            return None
        names = ", ".join(
            f"{kind} ({market}) in {where}" for where, kind, market in sorted(lacking)
        )
        self.choice = replace(
            self.choice, why=f"{before.why}; planned again, for no capacity was found for {names}"
        )
        return actions

    def keep(self, held_back: Sequence[Offer]) -> frozenset[str]:
        """As the last plan's move says."""
        return self.move.keep(held_back)

    def between(self, failed: int) -> None:
        """As the last plan's move says."""
        self.move.between(failed)

    def _choose(self, held: Mapping[NodeKey, int]) -> Choice:
        """The last plan where nothing changed, or none better is found in time; else a new one."""
        last = self.last
        if last is not None and self._stays(last):
            back = "nothing changed but the fleet, which goes back to its plan"
            why = "nothing changed" if last.nodes == held else back
            return Choice(None, last.nodes, last.replicas, why)
        nodes: Mapping[NodeKey, int] = last.nodes if last is not None else self.data.held
        replicas: Mapping[ReplicaKey, int] = last.replicas if last is not None else {}
        saving = self.spec.operate.least_saving_share
        try:
            found = replan(self.data, replicas, nodes, saving)
        except SolverStoppedError as error:
            if last is None or self.plans:
                raise
            return Choice(None, nodes, replicas, f"{error}; the last plan stays", stopped=True)
        decision = conclude(
            self.catalog, self.inputs, self.data, found.plan, found.homo_joint,
            mark=self.mark, applied=not self.draft, at=self.now,
        )  # fmt: skip
        return Choice(decision, found.plan.node_counts, found.plan.replica_counts, found.why)

    def _stays(self, last: reads.StoredPlan) -> bool:
        """Whether the last plan is still the one to follow."""
        offered = {node_key(offer) for offer in self.data.offers}
        restricted = self.scarce or self.lacking
        return last.fingerprint == self.mark and not restricted and last.nodes.keys() <= offered


def _refuse_unmakeable(choice: Choice, offers: Mapping[NodeKey, Offer], name: str) -> None:
    """Before anything is launched or ended."""
    missing = sorted(key for key in choice.nodes if key not in offers)
    if missing:
        domain, kind, market = missing[0]
        raise UnmakeablePlanError(
            f"{choice.why}, but it has {choice.nodes[missing[0]]} {kind} ({market}) in {domain}, "
            f"which the fleet of {name} can no longer make; raise allocation.deadline_s for a new "
            "plan"
        )


def _ranks(
    changes: ReplicaChanges,
    serve: Sequence[Replica],
    model_of: Mapping[str, str],
    leases: Sequence[Lease],
) -> Mapping[str, int]:
    """By lease, of replicas that end, serve, and are followed by others: in the order of going."""
    serves = {replica.id for replica in serve}
    coming = {
        model_of.get(replica.template_id)
        for replica in (*changes.kept, *changes.started)
        if replica.id not in serves
    }
    places = {
        replica.id: place
        for place, replica in enumerate(changes.ended, start=1)
        if replica.id in serves and model_of.get(replica.template_id) in coming
    }
    return {
        x.id: places[x.replica] for x in leases if x.replica is not None and x.replica in places
    }


def _followed(
    running: Sequence[Replica],
    wanted: Mapping[ReplicaKey, int],
    name: str,
    now: datetime,
    leases: Sequence[Lease],
    hinted: Collection[str],
) -> ReplicaChanges:
    """As `follow`, with others in place of those whose nodes may be taken."""
    shaken = {lease.replica for lease in leases if lease.id in hinted}
    steady = [replica for replica in running if replica.id not in shaken]
    found = follow(steady, wanted, name, now, lambda: uuid.uuid4().hex)
    ended = [replace(r, ended_at=now) for r in running if r.id in shaken]
    return replace(found, ended=(*found.ended, *ended))


def _is_allowed(lease: Lease, spec: ScenarioSpec) -> bool:
    """Whether the scenario still has room for a node that runs, whatever the market offers."""
    return (
        lease.domain in spec.domains
        and lease.node_class in spec.node_classes
        and (lease.market in spec.markets or lease.market is Market.OWNED)
    )

"""Chaos for the fleet: a cloud that misbehaves, controllers that are killed, and what must hold.

One schedule is a run of rounds (settle, reconcile, apply) against a simulated cloud with faults,
all drawn from a seed: no capacity, throttling, answers that are lost after the deed, requests
delivered twice, instances that are listed late, preemptions, instances ended by hand, clocks that
are wrong, and kills between any two steps. Then the cloud is quiet, and the fleet has to come to
the plan.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

from executor.apply import Caps, apply_actions, settle
from executor.fleet import Fleet, Launched, TransientError
from executor.simulated import SimulatedFleet
from planner.catch_up import Instance, InstanceState
from planner.leases import Actions, Lease, LeaseKey, LeaseState, LeaseStore, held_nodes, reconcile
from planner.types import Market, Offer

START = datetime(2026, 1, 1, tzinfo=UTC)
QUIET_ROUNDS = 6
CAP_USD_PER_HOUR = 9.0


LEAVING = {
    LeaseState.DRAINING, LeaseState.TERMINATING, LeaseState.TERMINATED, LeaseState.FAILED
}  # fmt: skip


class Killed(BaseException):
    """The controller's process ends here."""


def offer(domain: str, price: float, market: Market) -> Offer:
    """Of one instance type."""
    return Offer(
        domain=domain, instance_type="type-a", node_class="A x1", market=market,
        price_usd_per_hour=price, stock=100, stock_source="made up", zone=None, gpus=1, vcpus=4,
    )  # fmt: skip


OFFERS: dict[LeaseKey, Offer] = {
    (o.domain, o.instance_type, o.market): o
    for o in (
        offer("d1", 1.0, Market.ON_DEMAND), offer("d1", 0.5, Market.SPOT),
        offer("d2", 1.5, Market.ON_DEMAND),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Faults:
    """How the cloud and the machine misbehave; shares of calls, seconds."""

    throttled: float = 0.0
    lost: float = 0.0  # done, and not answered
    twice: float = 0.0  # a launch delivered two times
    tokens_ignored: bool = False  # so that two deliveries are two instances
    listed_late_s: float = 0.0
    stops_in_s: float = 0.0
    taken: float = 0.0  # instances preempted or ended by hand, per round
    skew_s: float = 0.0
    no_capacity: float = 0.0
    killed: float = 0.0  # rounds
    at_once: int = 1  # calls side by side

    @classmethod
    def draw(cls, rng: random.Random) -> Faults:
        """Some of them, each at its own rate."""

        def some(most: float) -> float:
            return rng.choice([0.0, most / 3, most])

        return cls(
            throttled=some(0.3), lost=some(0.4), twice=some(0.3),
            tokens_ignored=rng.random() < 0.2, listed_late_s=some(20.0), stops_in_s=some(90.0),
            taken=some(0.3), skew_s=rng.choice([0.0, 0.0, 30.0, 3600.0]), no_capacity=some(0.4),
            killed=some(0.7), at_once=rng.choice([1, 1, 6]),
        )  # fmt: skip

    @property
    def exact(self) -> bool:
        """Whether one token is one instance and clocks are right: then nothing may ever be off."""
        return not self.tokens_ignored and not self.skew_s


@dataclass
class Findings:
    """What went wrong, by kind."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str) -> None:
        self.counts[kind] += 1


class ChaosFleet:
    """A simulated cloud behind a bad line. Its own clock is right."""

    kind = "simulated"

    def __init__(
        self, cloud: SimulatedFleet, faults: Faults, rng: random.Random, findings: Findings,
        store: LeaseStore,
    ) -> None:  # fmt: skip
        self.cloud, self.faults, self.rng, self.findings = cloud, faults, rng, findings
        self.store, self.now, self.exact = store, START, faults.exact
        self.at_once, self.drain_s = faults.at_once, 0.0
        self.lock = threading.RLock()
        self.stopping: dict[str, datetime] = {}
        self.wanted: Mapping[LeaseKey, int] = {}

    def launch(self, lease: Lease, now: datetime) -> Launched:
        """As the protocol says, unless a fault comes between."""
        with self.lock:
            return self._launch(lease)

    def _launch(self, lease: Lease) -> Launched:
        self._throttle()
        if not any(one.id == lease.id for one in self.store.all()):
            self.findings.add("unwritten")
        before = {one.id for one in self.truth()}
        found = self.cloud.launch(lease, self.now)
        if self.rng.random() < self.faults.twice:
            ignored = self.faults.tokens_ignored
            self.cloud.launch(replace(lease, attempt=lease.attempt + 99) if ignored else lease,
                              self.now)  # fmt: skip
        if found.instance_id not in before:
            self._check(lease)
        if self.rng.random() < self.faults.lost:
            raise TransientError("the answer was lost")
        return found

    def terminate(self, instance_id: str) -> None:
        """It stops for a while before it is gone."""
        with self.lock:
            self._throttle()
            delay = timedelta(seconds=self.rng.random() * self.faults.stops_in_s)
            self.stopping.setdefault(instance_id, self.now + delay)
            if self.rng.random() < self.faults.lost:
                raise TransientError("the answer was lost")

    def instances(self, now: datetime) -> list[Instance]:
        """Those that are listed already."""
        self._throttle()
        late = timedelta(seconds=self.faults.listed_late_s)
        return [one for one in self.truth() if self.now - one.launched_at >= late]

    def elsewhere(self, lease: Lease) -> str | None:
        """As the cloud says."""
        return self.cloud.elsewhere(lease)

    def calls(self, lease: Lease) -> list[str]:
        """As the cloud says."""
        return self.cloud.calls(lease)

    def truth(self) -> list[Instance]:
        """All that there is."""
        with self.lock:
            return self._truth()

    def _truth(self) -> list[Instance]:
        found = []
        for one in self.cloud.instances(self.now):
            stops = self.stopping.get(one.id)
            if stops is not None and one.state.lives:
                over = stops <= self.now
                state = InstanceState.GONE if over else InstanceState.STOPPING
                found.append(replace(one, state=state))
            else:
                found.append(one)
        return found

    def wants(self, nodes: Mapping[LeaseKey, int]) -> None:
        """What the controller follows from now on."""
        self.wanted = nodes

    def take_some(self) -> None:
        """Preemptions, and users who end instances by hand."""
        for one in self.truth():
            if one.state.lives and self.rng.random() < self.faults.taken:
                self.cloud.terminate(one.id)

    def _throttle(self) -> None:
        if self.rng.random() < self.faults.throttled:
            raise TransientError("throttled")

    def _check(self, lease: Lease) -> None:
        """What must hold whenever an instance was made."""
        if not self.exact:
            return
        billing = [one for one in self.truth() if one.state is not InstanceState.GONE]
        mine = sum(one.lease_id == lease.id for one in billing)
        if mine > 1:
            self.findings.add("double")
        serving = {one.id for one in self.store.all() if one.key == lease.key}
        serving -= {one.id for one in self.store.all() if one.state in LEAVING}
        if sum(one.lease_id in serving for one in billing) > self.wanted.get(lease.key, 0):
            self.findings.add("surplus")
        prices = {one.id: one.price_usd_per_hour for one in self.store.all()}
        if sum(prices.get(one.lease_id, 0.0) for one in billing) > CAP_USD_PER_HOUR + 1e-9:
            self.findings.add("overspent")


class KillableStore:
    """A store whose controller may be killed before or after any save.

    A killed controller's other threads get no further either.
    """

    def __init__(self, inner: LeaseStore, findings: Findings) -> None:
        self.inner, self.findings = inner, findings
        self._left: int | None = None
        self._dead = False
        self._lock = threading.Lock()
        self.boundaries = 0
        self.alive: Callable[[], set[str]] = set  # lease ids of living instances, where exact

    def all(self) -> list[Lease]:
        return self.inner.all()

    def save(self, lease: Lease, at: datetime) -> None:
        self.save_all([lease], at)

    def save_all(self, leases: Sequence[Lease], at: datetime) -> None:
        self.boundary()
        alive = self.alive()
        for lease in leases:
            if lease.state.is_over and lease.id in alive:
                self.findings.add("unconfirmed")
        self.inner.save_all(leases, at)
        self.boundary()

    @property
    def left(self) -> int | None:
        """Boundaries until the kill; set for each controller anew."""
        return self._left

    @left.setter
    def left(self, boundaries: int | None) -> None:
        self._left, self._dead = boundaries, False

    def boundary(self) -> None:
        with self._lock:
            self.boundaries += 1
            if self._left is not None:
                self._left -= 1
                self._dead = self._dead or self._left < 0
            if self._dead:
                raise Killed


class KillableFleet:
    """A fleet whose controller may be killed before or after any call."""

    def __init__(self, inner: Fleet, store: KillableStore) -> None:
        self.inner, self.store, self.kind = inner, store, inner.kind
        self.at_once, self.drain_s = inner.at_once, inner.drain_s

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)

        def killable(*arguments: Any) -> Any:
            self.store.boundary()
            found = call(*arguments)
            self.store.boundary()
            return found

        return killable


class MemoryStore:
    """Leases of one schedule; what is saved survives a kill."""

    def __init__(self, leases: Sequence[Lease] = ()) -> None:
        self.leases: dict[str, Lease] = {lease.id: lease for lease in leases}

    def all(self) -> list[Lease]:
        return list(self.leases.values())

    def save(self, lease: Lease, at: datetime) -> None:
        self.leases[lease.id] = lease

    def save_all(self, leases: Sequence[Lease], at: datetime) -> None:
        self.leases.update({lease.id: lease for lease in leases})


@dataclass
class Replanning:
    """What `operate` does where offers have no capacity: more of another takes their place."""

    store: LeaseStore
    wanted: Mapping[LeaseKey, int]
    told: Callable[[Mapping[LeaseKey, int]], None]
    lacking: frozenset[LeaseKey] = frozenset()
    left: int = 2  # plans

    def instead(self, lacking: frozenset[LeaseKey]) -> Actions | None:
        """As `apply_actions` asks."""
        self.lacking |= lacking
        others = [key for key in OFFERS if key not in self.lacking]
        if not self.left or not others:
            return None
        self.left -= 1
        held = held_nodes(self.store.all())
        found = {k: min(n, held[k]) if k in lacking else n for k, n in self.wanted.items()}
        found[others[0]] += sum(self.wanted[key] - found[key] for key in lacking)
        self.wanted = found
        self.told(found)
        return reconcile(found, OFFERS, self.store.all())


def bring(
    store: LeaseStore,
    fleet: Fleet,
    wanted: Mapping[LeaseKey, int],
    now: datetime,
    told: Callable[[Mapping[LeaseKey, int]], None] = lambda _: None,
) -> None:
    """One round of a controller, as `operate` makes it, with a planning of its own."""
    leases = settle(store, fleet, now)
    actions = reconcile(wanted, OFFERS, leases)
    caps, other = Caps(usd_per_hour=CAP_USD_PER_HOUR), Replanning(store, wanted, told)
    apply_actions(store, fleet, actions, now, caps=caps, instead=other.instead)


@dataclass(frozen=True)
class Outcome:
    """Of one schedule."""

    found: Mapping[str, int]
    boundaries: int  # where a kill could have come
    kills: int


def run_schedule(seed: int, rounds: int = 10) -> Outcome:
    """One schedule, drawn from the seed: the same one again."""
    names = random.Random(-seed - 1)
    with patch("executor.apply.new_id", lambda: f"{names.getrandbits(128):032x}"):
        return _run(seed, rounds)


def _run(seed: int, rounds: int) -> Outcome:
    rng = random.Random(seed)
    faults, findings = Faults.draw(rng), Findings()
    memory = MemoryStore()
    cloud = SimulatedFleet(startup_minutes=5.0, failure_rate=faults.no_capacity, seed=seed)
    chaos = ChaosFleet(cloud, faults, rng, findings, memory)
    store = KillableStore(memory, findings)
    if faults.exact:
        store.alive = lambda: {one.lease_id for one in chaos.truth() if one.state.lives}
    fleet, kills = KillableFleet(chaos, store), 0
    wanted: dict[LeaseKey, int] = {}
    for _ in range(rounds):
        chaos.now += timedelta(seconds=rng.choice([5, 60, 300, 900]))
        chaos.take_some()
        if rng.random() < 0.7:
            wanted = {key: rng.randrange(4) for key in OFFERS}
        chaos.wants(wanted)
        skew = timedelta(seconds=rng.uniform(-faults.skew_s, faults.skew_s))
        store.left = rng.randrange(40) if rng.random() < faults.killed else None
        try:
            bring(store, fleet, wanted, chaos.now + skew, chaos.wants)
        except TransientError:
            pass  # the list could not be had: the next round
        except Killed:
            kills += 1
        store.left = None
    _come_to_rest(chaos, store, memory, wanted, findings)
    return Outcome(dict(findings.counts), store.boundaries, kills)


def _come_to_rest(
    chaos: ChaosFleet, store: KillableStore, memory: MemoryStore,
    wanted: Mapping[LeaseKey, int], findings: Findings,
) -> None:  # fmt: skip
    """No more faults: what is left has to agree with the plan, as far as the cap lets it."""
    chaos.faults = Faults()
    chaos.cloud = replace(chaos.cloud, failure_rate=0.0, _memory=chaos.cloud._memory)
    store.alive = set
    chaos.wanted = affordable = _within_cap(wanted)
    for _ in range(QUIET_ROUNDS):
        chaos.now += timedelta(seconds=200)
        bring(store, chaos, affordable, chaos.now)
    held = held_nodes(memory.all())
    if held != Counter({key: count for key, count in affordable.items() if count}):
        findings.add("unconverged")
    if any(lease.state in _UNFINISHED for lease in memory.all()):
        findings.add("unconverged")
    alive = Counter(one.lease_id for one in chaos.truth() if one.state.lives)
    keep = {lease.id for lease in memory.all() if lease.state.is_held}
    findings.counts["leaked"] += sum(n for name, n in alive.items() if name not in keep)
    findings.counts["double"] += sum(n > 1 for name, n in alive.items() if name in keep)
    findings.counts["lost"] += sum(name not in alive for name in keep)


_UNFINISHED = {LeaseState.PLANNED, LeaseState.DRAINING, LeaseState.TERMINATING}


def _within_cap(wanted: Mapping[LeaseKey, int]) -> dict[LeaseKey, int]:
    left, found = CAP_USD_PER_HOUR, {}
    for key in sorted(wanted):
        price = OFFERS[key].price_usd_per_hour
        found[key] = min(wanted[key], int(left / price + 1e-9))
        left -= found[key] * price
    return found

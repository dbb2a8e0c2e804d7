"""Bring a fleet to a plan: every step is written before it is taken and after it was confirmed.

Killed anywhere, the next run finishes what was begun (formulation, section 11).
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TypeVar

from executor.fleet import FatalError, Fleet, NoCapacityError, TransientError
from planner.catch_up import Ask, End, Patience, Record, catch_up
from planner.errors import CoralError
from planner.leases import Actions, Lease, LeaseKey, LeaseState, LeaseStore
from planner.types import Offer

NOT_IN_PLAN = "not in the plan"
ALL_DOWN = "coral down"
REFUSED = "refused: "  # before what a cloud says that will never make the node
PASSES = 4  # of one settling: end, see it gone, record, see that nothing is left
LAUNCH_WINDOW = timedelta(minutes=1)

Thing = TypeVar("Thing")
Answer = TypeVar("Answer")


def new_id() -> str:
    """Of a lease."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Caps:
    """What no round goes beyond; None: no cap."""

    usd_per_hour: float | None = None
    nodes_per_domain: int | None = None
    launches_per_minute: int | None = None

    def refuse(self, offer: Offer, leases: Sequence[Lease], now: datetime) -> str:
        """Why a node of the offer must not be launched beside these leases; '' where it may."""
        billing = [lease for lease in leases if not lease.state.is_over]
        rent = sum(lease.price_usd_per_hour for lease in billing) + offer.price_usd_per_hour
        if self.usd_per_hour is not None and rent > self.usd_per_hour:
            return f"${rent:.2f}/h is over the cap of ${self.usd_per_hour:.2f}/h"
        there = sum(lease.domain == offer.domain for lease in billing)
        if self.nodes_per_domain is not None and there >= self.nodes_per_domain:
            return f"{there} nodes are in {offer.domain}, its cap"
        lately = sum(
            lease.requested_at is not None and now - lease.requested_at < LAUNCH_WINDOW
            for lease in leases
        )
        if self.launches_per_minute is not None and lately >= self.launches_per_minute:
            return f"{lately} launches in a minute, the cap"
        return ""

    def fit(
        self, offers: Sequence[Offer], leases: Sequence[Lease], now: datetime
    ) -> Sequence[Offer]:
        """Those of which nodes may be beside the leases, launches a minute aside."""
        lasting, beside, found = replace(self, launches_per_minute=None), [*leases], []
        for offer in offers:
            if not lasting.refuse(offer, beside, now):
                beside.append(lease_of(offer, now))
                found.append(offer)
        return found


@dataclass(frozen=True, slots=True)
class Applied:
    """What was done."""

    launched: int  # instances made, also of what an earlier round asked for
    failed: int
    terminated: int
    held_back: int = 0  # launches that a cap did not allow
    refused: int = 0  # of those that failed: the cloud will never do it
    why: tuple[str, ...] = ()  # launches failed or were held back, each reason once

    @property
    def nothing(self) -> bool:
        return not (self.launched or self.failed or self.terminated or self.held_back)


def apply_actions(
    store: LeaseStore,
    fleet: Fleet,
    actions: Actions,
    now: datetime,
    scenario: str = "",
    between: Callable[[int], None] = lambda _: None,
    caps: Caps | None = None,
    keep: Callable[[Sequence[Offer]], Collection[str]] = lambda _: (),
    instead: Callable[[frozenset[LeaseKey]], Actions | None] = lambda _: None,
) -> Applied:
    """Ask again for what was planned and not answered, launch, let leave what the plan lacks.

    `instead` is called where offers have no capacity, with those: the actions of another plan from
    where the fleet stands then, or None to leave it at that. `between` is called when nodes are
    launched and those that leave are marked, but still run: with the number of the last plan's
    launches that failed. While one fails nothing is terminated: what leaves may be all that serves.
    A launch that a cap holds back stops nothing: what leaves makes room for it in the next round.
    `keep` is called before, with the offers held back: leases that leave later. What leaves and has
    no known instance goes first: its answer may have been lost, so that another one would be one
    too many.
    """
    unasked = _drop_unasked(store, actions, now)
    launches = _Launches(store, fleet, now, scenario, caps or Caps())
    launches.again()
    launches.new(actions.launch)
    while launches.lacking:
        other = instead(frozenset(launches.lacking))
        if other is None:
            break
        actions = other
        unasked += _drop_unasked(store, actions, now)
        launches.begin_anew()
        launches.new(actions.launch)
    kept = keep([offer for offer, _ in launches.held_back])
    others = [x for x in actions.terminate if x.state is not LeaseState.PLANNED]
    leaving = () if launches.open else [x for x in others if x.id not in kept]
    marked = [_marked(lease, fleet, now) for lease in leaving]
    store.save_all(marked, now)
    between(launches.open)
    end_leases(store, fleet, [x for x in marked if x.drain_until is None], now, NOT_IN_PLAN)
    if marked or unasked:
        with contextlib.suppress(TransientError):  # the next round looks again
            settle(store, fleet, now, scenario)
    held_back = [why for _, why in launches.held_back]
    return Applied(
        launched=launches.made,
        failed=len(launches.failed),
        terminated=unasked + len(leaving),
        held_back=len(held_back),
        refused=launches.refused,
        why=tuple(dict.fromkeys((*launches.failed, *held_back))),
    )


def lease_of(offer: Offer, now: datetime, scenario: str = "", fleet: str = "") -> Lease:
    """A new one of an offer, planned."""
    return Lease(
        id=new_id(),
        domain=offer.domain,
        instance_type=offer.instance_type,
        node_class=offer.node_class,
        market=offer.market,
        price_usd_per_hour=offer.price_usd_per_hour,
        state=LeaseState.PLANNED,
        created_at=now,
        zone=offer.zone,
        scenario=scenario,
        fleet=fleet,
        requested_at=now,
    )


def settle(
    store: LeaseStore,
    fleet: Fleet,
    now: datetime,
    scenario: str | None = None,
    patience: Patience | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> list[Lease]:
    """Bring leases and instances into agreement, and finish what an interrupted run began.

    What is planned and has no instance is not asked for here: the plan may not want it any more.
    `told` hears of every instance that is told to end. Returns the scenario's leases, or all
    without one. Raises TransientError, FatalError: the cloud does not list its instances.
    """
    patience = patience or Patience()
    for _ in range(PASSES):
        instances = fleet.instances(now)  # before the leases are read
        steps = catch_up(_of_fleet(store, fleet), instances, now, patience)
        todo = [step for step in steps if not isinstance(step, Ask)]
        store.save_all([step.lease for step in todo if isinstance(step, Record)], now)
        ends = [step.instance_id for step in todo if isinstance(step, End)]
        _terminate(fleet, ends)
        for name in ends:
            told(name)
        if not todo:
            break
    return [lease for lease in store.all() if scenario in {None, lease.scenario}]


def end_leases(
    store: LeaseStore, fleet: Fleet, leases: Sequence[Lease], now: datetime, reason: str
) -> None:
    """Tell the cloud to end nodes; `settle` writes that they are over when the cloud says so."""
    told = [x for x in leases if x.state is not LeaseState.TERMINATING]
    store.save_all([lease.to(LeaseState.TERMINATING, reason) for lease in told], now)
    _terminate(fleet, [lease.instance_id for lease in leases if lease.instance_id is not None])


def end_all(store: LeaseStore, fleet: Fleet, leases: Sequence[Lease], now: datetime) -> int:
    """Terminate everything that is not over; how many there were."""
    running = [lease for lease in leases if not lease.state.is_over]
    end_leases(store, fleet, running, now, ALL_DOWN)
    if running:
        settle(store, fleet, now)
    return len(running)


def _drop_unasked(store: LeaseStore, actions: Actions, now: datetime) -> int:
    """Leases that leave and have no known instance; how many."""
    unasked = [lease for lease in actions.terminate if lease.state is LeaseState.PLANNED]
    store.save_all([lease.to(LeaseState.TERMINATING, NOT_IN_PLAN) for lease in unasked], now)
    return len(unasked)


def _of_fleet(store: LeaseStore, fleet: Fleet) -> list[Lease]:
    """Leases of every scenario: an instance of any of them is no orphan."""
    return [lease for lease in store.all() if lease.fleet == fleet.kind]


def _terminate(fleet: Fleet, instance_ids: Sequence[str]) -> None:
    """Where the cloud does not answer the next pass tells it again."""

    def end(instance_id: str) -> None:
        with contextlib.suppress(TransientError):
            fleet.terminate(instance_id)

    _side_by_side(fleet, end, instance_ids)


def _side_by_side(
    fleet: Fleet, call: Callable[[Thing], Answer], things: Sequence[Thing]
) -> list[Answer]:
    """Answers in the order of the things; as many calls at once as the fleet takes."""
    if fleet.at_once == 1 or len(things) < 2:
        return [call(thing) for thing in things]
    with ThreadPoolExecutor(fleet.at_once) as pool:
        return list(pool.map(call, things))


def _marked(lease: Lease, fleet: Fleet, now: datetime) -> Lease:
    """It drains where it serves, and is ended later where ending it would not let it."""
    if lease.state is not LeaseState.READY:
        return lease.to(LeaseState.TERMINATING, NOT_IN_PLAN)
    until = now + timedelta(seconds=fleet.drain_s) if fleet.drain_s else None
    return lease.to(LeaseState.DRAINING, NOT_IN_PLAN, drain_until=until)


@dataclass
class _Launches:
    """Of one round, within the caps."""

    store: LeaseStore
    fleet: Fleet
    now: datetime
    scenario: str
    caps: Caps

    def __post_init__(self) -> None:
        self.made = 0  # instances, of new leases and of those asked again
        self.failed: list[str] = []  # of all plans of the round
        self.refused = 0
        self.begin_anew()
        self.open = 0  # launches of this plan that failed

    def begin_anew(self) -> None:
        """Of another plan, from where the fleet stands; what was not answered stays open."""
        self.leases = self.store.all()
        self.held_back: list[tuple[Offer, str]] = []
        self.lacking: set[LeaseKey] = set()  # no capacity
        self.open = len(self._planned)

    @property
    def _planned(self) -> list[Lease]:
        """Leases whose answer is not known."""
        mine = (self.scenario, self.fleet.kind)
        return [
            lease
            for lease in self.leases
            if lease.state is LeaseState.PLANNED and (lease.scenario, lease.fleet) == mine
        ]

    def again(self) -> None:
        """Ask for leases whose answer is not known, with their tokens."""
        self._ask([replace(lease, requested_at=self.now) for lease in self._planned])

    def new(self, offers: Iterable[Offer]) -> None:
        """Nodes more, as far as the caps and the cloud let."""
        asked = []
        for offer in offers:
            refused = self.caps.refuse(offer, self.leases, self.now)
            if refused:
                self.held_back.append((offer, refused))
                continue
            asked.append(lease_of(offer, self.now, self.scenario, self.fleet.kind))
            self.leases.append(asked[-1])  # counts against the caps until it is known to be over
        self._ask(asked)

    def _ask(self, leases: Sequence[Lease]) -> None:
        """Written first, all of them; asked side by side where the fleet takes that."""
        self.store.save_all(leases, self.now)

        def ask(lease: Lease) -> CoralError | None:
            return _request(self.store, self.fleet, lease, self.now)

        for lease, error in zip(leases, _side_by_side(self.fleet, ask, leases), strict=True):
            if error is None:
                self.made += 1
                continue
            self.failed.append(str(error))
            self.open += 1
            self.refused += isinstance(error, FatalError)
            if isinstance(error, NoCapacityError):
                self.lacking.add(lease.key)


def _request(store: LeaseStore, fleet: Fleet, lease: Lease, now: datetime) -> CoralError | None:
    """Why there is no instance, or None. Where the cloud does not answer the lease stays planned.

    Where a zone has no capacity the next one is asked, as another attempt: with another token,
    written first. A lease that several had none for is of no zone any more.
    """
    while True:
        try:
            launched = fleet.launch(lease, now)
        except NoCapacityError as error:
            zone = fleet.elsewhere(lease)
            if zone is None:
                where = None if lease.attempt else lease.zone
                failed = lease.to(LeaseState.FAILED, str(error), ended_at=now, zone=where)
                store.save(failed, now)
                return error
            lease = replace(lease, zone=zone, attempt=lease.attempt + 1, reason=str(error))
            store.save(lease, now)
        except FatalError as error:
            why = f"{REFUSED}{error}"
            store.save(lease.to(LeaseState.FAILED, why, ended_at=now), now)
            return error
        except TransientError as error:
            return error
        else:
            launching = lease.to(
                LeaseState.LAUNCHING, instance_id=launched.instance_id, ready_at=launched.ready_at
            )
            store.save(launching, now)
            return None

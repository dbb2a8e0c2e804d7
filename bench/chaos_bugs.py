"""Controllers with one mistake each: the chaos must catch every one of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any
from unittest.mock import patch

import bench.chaos as chaos
import executor.apply as applying
import planner.catch_up as catching
import planner.leases as leasing
from executor.fleet import NoCapacityError, TransientError
from planner.leases import Lease, LeaseState


@contextlib.contextmanager
def written_after() -> Iterator[None]:
    """The lease is written only when the cloud has answered."""

    class Late:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def save(self, lease: Lease, at: datetime) -> None:
            if lease.state is not LeaseState.PLANNED:
                self.store.save(lease, at)

        def save_all(self, leases: Sequence[Lease], at: datetime) -> None:
            kept = [lease for lease in leases if lease.state is not LeaseState.PLANNED]
            self.store.save_all(kept, at)

    make = applying._Launches.__post_init__

    def late(self: Any) -> None:
        make(self)
        self.store = Late(self.store)

    with patch.object(applying._Launches, "__post_init__", late):
        yield


@contextlib.contextmanager
def fresh_tokens() -> Iterator[None]:
    """Every request has a token of its own."""
    numbers = random.Random(1)
    with patch.object(Lease, "token", property(lambda _: f"coral-{numbers.random()}")):
        yield


@contextlib.contextmanager
def unconfirmed_end() -> Iterator[None]:
    """Over as soon as the cloud was told."""

    def end(store: Any, fleet: Any, leases: Sequence[Lease], now: datetime, why: str) -> None:
        told(store, fleet, leases, now, why)
        known = {lease.id: lease for lease in store.all()}
        over = [known[lease.id].to(LeaseState.TERMINATED, why, ended_at=now) for lease in leases]
        store.save_all(over, now)

    told = applying.end_leases
    with patch.object(applying, "end_leases", end):
        yield


@contextlib.contextmanager
def no_sweep() -> Iterator[None]:
    """Instances whose lease is over, or is not there, are left alone."""
    look = catching.catch_up

    def only_held(leases: Sequence[Lease], *rest: Any) -> list[Any]:
        names = {one.id for one in leases if not one.state.is_over}
        instances = [one for one in rest[0] if one.lease_id in names]
        return look(leases, instances, *rest[1:])

    with patch.object(applying, "catch_up", only_held):
        yield


@contextlib.contextmanager
def silence_is_failure() -> Iterator[None]:
    """A request that was not answered is taken to have failed."""
    request = applying._request

    class Deaf:
        def __init__(self, fleet: Any) -> None:
            self.fleet, self.at_once, self.drain_s = fleet, fleet.at_once, fleet.drain_s

        def launch(self, lease: Lease, now: datetime) -> Any:
            try:
                return self.fleet.launch(lease, now)
            except TransientError as error:
                raise NoCapacityError(str(error)) from error

        def elsewhere(self, lease: Lease) -> str | None:
            return None

    with patch.object(
        applying, "_request", lambda store, fleet, *rest: request(store, Deaf(fleet), *rest)
    ):
        yield


@contextlib.contextmanager
def unseen_is_gone() -> Iterator[None]:
    """An instance that is not listed at once is taken to be gone."""
    with patch.object(catching, "_fresh", lambda *_: False):
        yield


@contextlib.contextmanager
def doubles_stay() -> Iterator[None]:
    """A second instance of a lease is not ended."""
    with patch.object(catching, "_others", lambda *_: []):
        yield


@contextlib.contextmanager
def cap_of_ready_ones() -> Iterator[None]:
    """The cap counts nodes that serve, not those that come up or end."""
    refuse = applying.Caps.refuse

    def only_ready(self: Any, offer: Any, leases: Sequence[Lease], now: datetime) -> str:
        ready = [one for one in leases if one.state is LeaseState.READY]
        return refuse(self, offer, ready, now)

    with patch.object(applying.Caps, "refuse", only_ready):
        yield


@contextlib.contextmanager
def planned_not_counted() -> Iterator[None]:
    """A lease whose answer is not known is launched a second time."""
    fewer = leasing.HELD - {LeaseState.PLANNED}
    with patch.object(leasing, "HELD", fewer):
        yield


@contextlib.contextmanager
def drains_for_ever() -> Iterator[None]:
    """Nobody ends a node whose drain was interrupted."""
    own = catching._own

    def unless_draining(lease: Lease, *rest: Any) -> list[Any]:
        return [] if lease.state is LeaseState.DRAINING else own(lease, *rest)

    with patch.object(catching, "_own", unless_draining):
        yield


@contextlib.contextmanager
def forgets_the_planned() -> Iterator[None]:
    """A planned lease is never asked for again."""
    with patch.object(applying._Launches, "again", lambda _: None):
        yield


@contextlib.contextmanager
def new_token_on_retry() -> Iterator[None]:
    """What was asked before is asked again as another attempt: another token and instance."""

    def again(self: Any) -> None:
        self._ask([replace(x, attempt=x.attempt + 1, requested_at=self.now) for x in self._planned])

    with patch.object(applying._Launches, "again", again):
        yield


@contextlib.contextmanager
def asks_before_it_plans() -> Iterator[None]:
    """What an earlier plan wanted is launched, whatever the plan now says."""

    def bring(store: Any, fleet: Any, *rest: Any, **more: Any) -> Any:
        applying._Launches(store, fleet, rest[1], "", applying.Caps()).again()
        return act(store, fleet, *rest, **more)

    act = chaos.apply_actions
    with patch.object(chaos, "apply_actions", bring):
        yield


@contextlib.contextmanager
def next_plan_of_old_leases() -> Iterator[None]:
    """The next offer is planned from where the fleet stood before the round's first launch."""
    make = chaos.Replanning.__init__

    def remembering(self: Any, store: Any, *rest: Any, **more: Any) -> None:
        make(self, store, *rest, **more)
        self.store = chaos.MemoryStore(store.all())

    with patch.object(chaos.Replanning, "__init__", remembering):
        yield


BUGS: Mapping[str, Any] = {
    bug.__name__: bug
    for bug in (
        written_after, fresh_tokens, unconfirmed_end, no_sweep, silence_is_failure, unseen_is_gone,
        doubles_stay, cap_of_ready_ones, planned_not_counted, drains_for_ever, forgets_the_planned,
        new_token_on_retry, asks_before_it_plans, next_plan_of_old_leases,
    )
}  # fmt: skip

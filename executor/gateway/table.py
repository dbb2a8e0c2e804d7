"""Which engine takes the next request: the plan's weights, corrected by what is in flight.

Of the engines of a model's phase the one with the least work in flight per weight takes it, so
that shares follow the plan while all are alike, and a slow one gets less.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from executor.files import stamp
from executor.gateway.door import part_of
from executor.gateway.replicas import ReplicaBook, Use
from executor.routes import Objective, Route, Routes, RoutesError, read_routes
from planner.types import Phase

log = logging.getLogger(__name__)
REST_S = 5.0
MOST_IN_FLIGHT = 1024  # of an engine: vLLM runs up to so many at once on the largest GPUs


@dataclass
class Target:
    """One engine of a replica."""

    url: str
    route: Route  # of its replica
    weight: float
    in_flight: int = 0
    sent: int = 0
    rests_until: float = 0.0  # after a failure, while another engine is there

    @property
    def domain(self) -> str:
        return self.route.domain

    def load(self) -> tuple[float, float]:
        """In flight, then all ever sent and one more, per weight: the least is next."""
        return (self.in_flight / self.weight, (self.sent + 1) / self.weight)


@dataclass
class RouteTable:
    """Routes as the controller pushes them; where none does, of its file, when that changes."""

    path: Path
    book: ReplicaBook
    most_in_flight: int = MOST_IN_FLIGHT
    gateways: int = 1  # that share an engine's room
    models: frozenset[str] = frozenset()
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    targets: dict[tuple[str, Phase], list[Target]] = field(default_factory=dict)
    _seen: tuple[int, int] | None = None

    def refresh(self) -> None:
        """Take over what changed in the file; a broken one changes nothing."""
        mark = stamp(self.path)
        if mark == self._seen:
            return
        self._seen = mark
        try:
            self.take(read_routes(self.path))
        except RoutesError as error:
            log.error("%s; the routes known stay", error)

    def take(self, routes: Routes) -> None:
        """Routes from now on; engines that stay keep their counts."""
        known = {t.url: t for targets in self.targets.values() for t in targets}
        found: dict[tuple[str, Phase], list[Target]] = {}
        for route in routes.routes:
            weight = route.weight / len(route.urls)
            for url in route.urls:
                target = known.get(url) or Target(url, route, weight)
                target.weight, target.route = weight, route
                found.setdefault((route.model, route.phase), []).append(target)
        if found.keys() != self.targets.keys() or any(
            {t.url for t in found[key]} != {t.url for t in self.targets[key]} for key in found
        ):
            for target in (t for targets in found.values() for t in targets):
                target.sent = 0  # shares begin anew with who is there
        self.models, self.targets = frozenset(routes.models), found
        self.objectives = routes.objectives

    def is_full(self, model: str) -> bool:
        """Whether an engine of a model has no room for another request."""
        return any(
            self._lacks_room(target)
            for phase in Phase
            for target in self.targets.get((model, phase), [])
        )

    def pick_decode(self, model: str, tried: Collection[str] = ()) -> Target | None:
        """The next decode engine that has a prefill engine in its domain."""
        prefill = self._there(model, Phase.PREFILL, tried)
        return self.pick(model, Phase.DECODE, tried, {target.domain for target in prefill})

    def pick(
        self,
        model: str,
        phase: Phase,
        tried: Collection[str] = (),
        domains: Collection[str] | None = None,
    ) -> Target | None:
        """The next engine (in some domains) with room and not tried yet; None: there is none."""
        there = [
            target
            for target in self._there(model, phase, tried)
            if domains is None or target.domain in domains
        ]
        now = time.monotonic()
        return min(there, key=lambda t: (t.rests_until > now, *t.load(), t.url), default=None)

    @contextmanager
    def taken(self, target: Target, *, stream: bool = False) -> Iterator[Use]:
        """Counts one request on an engine, and at its replica."""
        target.in_flight += 1
        target.sent += 1
        use = Use(self.book.meter(target.route), stream=stream)
        try:
            yield use
        finally:
            target.in_flight -= 1
            use.end()

    def rest(self, target: Target) -> None:
        """Leave an engine that could not be reached, or broke off, for a while."""
        target.rests_until = time.monotonic() + REST_S

    def _there(self, model: str, phase: Phase, tried: Collection[str]) -> list[Target]:
        return [
            target
            for target in self.targets.get((model, phase), [])
            if target.url not in tried and not self._lacks_room(target)
        ]

    def _lacks_room(self, target: Target) -> bool:
        return target.in_flight >= part_of(self.most_in_flight, self.gateways)

"""Which engine takes the next request: the plan's weights, corrected by what is in flight.

Of the engines of a model's phase the one with the least work in flight per weight takes it, so
that shares follow the plan while all are alike, and a slow one gets less.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from executor.routes import Routes, RoutesError, read_routes
from planner.types import Phase

REST_S = 5.0


@dataclass
class Target:
    """One engine of a replica."""

    url: str
    replica_id: str
    weight: float
    domain: str = ""
    in_flight: int = 0
    sent: int = 0
    rests_until: float = 0.0  # after a failure, while another engine is there

    def load(self) -> tuple[float, float]:
        """In flight, then all ever sent and one more, per weight: the least is next."""
        return (self.in_flight / self.weight, (self.sent + 1) / self.weight)


@dataclass
class RouteTable:
    """Routes of a file, read again when it changes."""

    path: Path
    models: frozenset[str] = frozenset()
    targets: dict[tuple[str, Phase], list[Target]] = field(default_factory=dict)
    _seen: tuple[int, int] | None = None

    def refresh(self) -> None:
        """Take over what changed; engines that stay keep their counts.

        A broken file changes nothing.
        """
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            self._take(Routes())
            self._seen = None
            return
        mark = (stat.st_mtime_ns, stat.st_ino)
        if mark != self._seen:
            try:
                self._take(read_routes(self.path))
            except RoutesError:
                return
            self._seen = mark

    def _take(self, routes: Routes) -> None:
        known = {t.url: t for targets in self.targets.values() for t in targets}
        found: dict[tuple[str, Phase], list[Target]] = {}
        for route in routes.routes:
            weight = route.weight / len(route.urls)
            for url in route.urls:
                target = known.get(url) or Target(url, route.replica_id, weight)
                target.weight, target.replica_id = weight, route.replica_id
                target.domain = route.domain
                found.setdefault((route.model, route.phase), []).append(target)
        if found.keys() != self.targets.keys() or any(
            {t.url for t in found[key]} != {t.url for t in self.targets[key]} for key in found
        ):
            for target in (t for targets in found.values() for t in targets):
                target.sent = 0  # shares begin anew with who is there
        self.models, self.targets = frozenset(routes.models), found

    def phases(self, model: str) -> tuple[bool, bool]:
        """Whether a model can be served by one aggregated replica, and by a pair."""
        pair = self.pick_decode(model) is not None
        return bool(self.targets.get((model, Phase.AGGREGATED))), pair

    def pick_decode(self, model: str, tried: Collection[str] = ()) -> Target | None:
        """The next decode engine that has a prefill engine in its domain."""
        prefill = self.targets.get((model, Phase.PREFILL), [])
        domains = {target.domain for target in prefill if target.url not in tried}
        return self.pick(model, Phase.DECODE, tried, domains)

    def pick(
        self,
        model: str,
        phase: Phase,
        tried: Collection[str] = (),
        domains: Collection[str] | None = None,
    ) -> Target | None:
        """The next engine (in some domains) that was not tried yet; None where there is none."""
        there = [
            target
            for target in self.targets.get((model, phase), [])
            if target.url not in tried and (domains is None or target.domain in domains)
        ]
        now = time.monotonic()
        return min(there, key=lambda t: (t.rests_until > now, *t.load(), t.url), default=None)

    def rest(self, target: Target) -> None:
        """Leave an engine that could not be reached, or broke off, for a while."""
        target.rests_until = time.monotonic() + REST_S


@contextmanager
def taken(target: Target) -> Iterator[Target]:
    """Counts one request on an engine."""
    target.in_flight += 1
    target.sent += 1
    try:
        yield target
    finally:
        target.in_flight -= 1

"""Gateways that the controller tells where requests go.

A gateway says every second what it has; it is sent the routes when they are others, and at once
when they change. So a message that is lost costs a second, and the controller knows who has what.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from executor.control.messages import WireError, encode

LOST_AFTER_S = 4.0  # without a word


@dataclass
class _Gateway:
    """One that said something lately."""

    route: bytes  # its connection
    seen_at: float
    has: str  # the mark of the routes that it knows


class Gateways:
    """All of one controller."""

    def __init__(self, send: Callable[[bytes, bytes], None], clock: Callable[[], float]) -> None:
        self._send, self._clock = send, clock
        self._there: dict[str, _Gateway] = {}
        self._routes: Mapping[str, Any] | None = None  # None: not known yet
        self._mark = ""

    @property
    def count(self) -> int:
        """That are there: limits that all together keep are shared among so many."""
        self._forget()
        return len(self._there)

    @property
    def have_all(self) -> bool:
        """Whether every one that is there knows the routes as they are."""
        self._forget()
        return all(gateway.has == self._mark for gateway in self._there.values())

    def publish(self, routes: Mapping[str, Any]) -> None:
        """Others from now on."""
        self._routes, self._mark = routes, uuid.uuid4().hex
        self._forget()
        for gateway in self._there.values():
            self._tell(gateway)

    def hear(self, route: bytes, message: Mapping[str, Any]) -> None:
        """What one says of itself.

        Raises WireError: it has no name.
        """
        name, has = message.get("gateway"), message.get("has")
        if not (isinstance(name, str) and name and isinstance(has, str)):
            raise WireError("a gateway without a name, or one that does not say what it has")
        gateway = self._there[name] = _Gateway(route, self._clock(), has)
        self._tell(gateway)

    def _tell(self, gateway: _Gateway) -> None:
        """How many gateways there are, and the routes where it has others."""
        news = None if gateway.has == self._mark else self._routes
        text = encode("routes", mark=self._mark, gateways=len(self._there), routes=news)
        self._send(gateway.route, text)

    def _forget(self) -> None:
        now = self._clock()
        self._there = {k: g for k, g in self._there.items() if now - g.seen_at < LOST_AFTER_S}

"""Who may ask, and how much at once: keys of the key file, and the limits of each."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from executor.files import stamp
from executor.gateway.errors import over_limit, wrong_key
from executor.gateway.keys import ApiKey, ApiKeyError, hash_of, read_api_keys

log = logging.getLogger(__name__)
SOON_S = 1  # to try again after requests in flight


@dataclass
class _Use:
    """What one key has under way; `allowance` fills up again over a minute."""

    in_flight: int = 0
    allowance: float = 0.0
    counted_at: float = 0.0


class Door:
    """Checks every request; the file is read again when it changes."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.clock = path, clock
        self.gateways = 1  # that share a key's limits, each an equal part
        self._keys: dict[str, ApiKey] | None = None  # by hash; None: open to everybody
        self._uses: dict[str, _Use] = {}
        self._seen: tuple[int, int] | None = None
        self._read()

    def refresh(self) -> None:
        """Take over what changed; a broken file changes nothing."""
        try:
            self._read()
        except ApiKeyError as error:
            log.error("%s; the keys known stay", error)

    def check(self, authorization: str | None) -> ApiKey | None:
        """The key of a request; None where none is asked for.

        Raises RequestError: no key, or not one of these.
        """
        if self._keys is None:
            return None
        kind, _, secret = (authorization or "").partition(" ")
        key = self._keys.get(hash_of(secret.strip())) if kind.lower() == "bearer" else None
        if key is None:
            raise wrong_key()
        return key

    @contextmanager
    def entered(self, authorization: str | None) -> Iterator[None]:
        """While a request is under way.

        Raises RequestError: no key, or more than it may.
        """
        key = self.check(authorization)
        if key is None:
            yield
            return
        use = self._uses.setdefault(key.id, _Use(0, float(key.per_minute or 0), self.clock()))
        self._count(key, use)
        use.in_flight += 1
        try:
            yield
        finally:
            use.in_flight -= 1

    def _count(self, key: ApiKey, use: _Use) -> None:
        if key.in_flight is not None and use.in_flight >= part_of(key.in_flight, self.gateways):
            raise over_limit(f"{key.in_flight} requests in flight", SOON_S)
        if key.per_minute is None:
            return
        mine = key.per_minute / self.gateways
        now, rate = self.clock(), mine / 60.0
        grown = use.allowance + rate * (now - use.counted_at)
        use.allowance, use.counted_at = min(max(1.0, mine), grown), now
        if use.allowance < 1.0:
            wait_s = math.ceil((1.0 - use.allowance) / rate - 1e-6)
            raise over_limit(f"{key.per_minute} requests a minute", wait_s)
        use.allowance -= 1.0

    def _read(self) -> None:
        mark = stamp(self.path)
        if mark != self._seen:
            found = read_api_keys(self.path)
            self._keys = None if found is None else {key.sha256: key for key in found.keys}
            self._seen = mark


def part_of(limit: int, gateways: int) -> int:
    """One gateway's of what all may have together; at least one."""
    return -(-limit // gateways)

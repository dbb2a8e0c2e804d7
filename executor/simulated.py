"""The simulated fleet: a cloud without an account, with start-up delays and failures.

What a launch comes to depends on its token alone (hashed with the seed), so a repeated request
gives the same instance and a run can be repeated.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta

from executor.fleet import NoCapacityError
from planner.leases import Lease


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Launches that take `startup_minutes` on average and fail at a rate."""

    startup_minutes: float = 10.0
    failure_rate: float = 0.0
    seed: int = 0

    def launch(self, lease: Lease, now: datetime) -> tuple[str, datetime]:
        """Instance id and the time at which it will be ready.

        Raises NoCapacityError: as often as `failure_rate` says.
        """
        if self._draw("fails", lease.id) < self.failure_rate:
            raise NoCapacityError(
                f"no capacity for {lease.instance_type} in {lease.domain} ({lease.market})"
            )
        # Between 0.6 and 1.4 of the mean: images and weights take different times to arrive.
        minutes = self.startup_minutes * (0.6 + 0.8 * self._draw("delay", lease.id))
        digest = hashlib.sha256(f"{self.seed}|{lease.id}".encode()).hexdigest()
        return f"sim-{digest[:12]}", now + timedelta(minutes=minutes)

    def terminate(self, instance_id: str) -> None:
        """End an instance; ending one twice, or one that never was, is quiet."""

    def is_gone(self, instance_id: str) -> bool:
        """Never: a simulated node runs until it is terminated."""
        return False

    def _draw(self, what: str, token: str) -> float:
        digest = hashlib.sha256(f"{self.seed}|{what}|{token}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

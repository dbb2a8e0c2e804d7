"""What a fleet can do, whichever it is."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from planner.errors import CoralError
from planner.leases import Lease


class NoCapacityError(CoralError):
    """There is no such node now; try the next offer."""


class Fleet(Protocol):
    """Where nodes come from. Each call may be repeated: a lease has one instance."""

    def launch(self, lease: Lease, now: datetime) -> tuple[str, datetime]:
        """Instance id and the time at which it will be ready.

        Raises NoCapacityError.
        """
        ...

    def terminate(self, instance_id: str) -> None:
        """End an instance; one that is gone is quiet."""
        ...

    def is_gone(self, instance_id: str) -> bool:
        """Whether an instance that was launched does not run any more."""
        ...

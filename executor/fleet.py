"""What a fleet can do, whichever it is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from planner.catch_up import Instance
from planner.errors import CoralError, InputError
from planner.leases import Lease


class NoCapacityError(CoralError):
    """There is no such node now, and none was made; try the next offer."""


class TransientError(CoralError):
    """The cloud did not answer, or not now; what it did is not known. Ask again with the token."""


class FatalError(InputError):
    """The cloud will not do this however often it is asked, and made nothing."""


@dataclass(frozen=True, slots=True)
class Launched:
    """What the cloud answered."""

    instance_id: str
    ready_at: datetime | None = None  # where it is known beforehand


class Fleet(Protocol):
    """Where nodes come from. Each call may be repeated: a lease has one instance."""

    @property
    def kind(self) -> str:
        """Of its leases."""
        ...

    def launch(self, lease: Lease, now: datetime) -> Launched:
        """Make the lease's instance; the same token again gives the same one.

        Raises NoCapacityError, TransientError, FatalError.
        """
        ...

    def terminate(self, instance_id: str) -> None:
        """Tell the cloud to end an instance; one that is gone is quiet.

        Raises TransientError, FatalError.
        """
        ...

    def instances(self, now: datetime) -> list[Instance]:
        """All instances of this fleet that the cloud lists, those that are over for a while too.

        Raises TransientError, FatalError.
        """
        ...

    def elsewhere(self, lease: Lease) -> str | None:
        """The next zone to ask for the same offer, after one had no capacity."""
        ...

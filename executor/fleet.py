"""What a fleet can do, whichever it is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from planner.catch_up import Instance
from planner.errors import CoralError, InputError
from planner.leases import Lease

ONCE = "unless it is there"  # ends what a fleet asks at most once


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

    @property
    def at_once(self) -> int:
        """Launches that may be asked for side by side."""
        ...

    @property
    def drain_s(self) -> float:
        """Seconds that a node which serves goes on before it may be ended; 0: ending it drains."""
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

    def calls(self, lease: Lease) -> list[str]:
        """What a launch would ask of the cloud, in words; nothing is asked."""
        ...


def launch_in_words(lease: Lease) -> str:
    """Of a fleet that is no cloud."""
    zone = f", zone {lease.zone}" if lease.zone else ""
    return (
        f"launch {lease.instance_type} in {lease.domain}{zone} ({lease.market}, "
        f"${lease.price_usd_per_hour:.4f}/h)"
    )

"""EC2's error codes, in one table: no capacity, ask again, or never."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from executor.aws.errors import ThrottledError, UnreachableError, code_of, explain
from executor.fleet import FatalError, NoCapacityError, TransientError
from planner.errors import CoralError

NO_CAPACITY = frozenset({
    "InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientCapacity",
    "InsufficientReservedInstanceCapacity", "MaxSpotInstanceCountExceeded", "SpotMaxPriceTooLow",
    "VcpuLimitExceeded", "InstanceLimitExceeded", "UnfulfillableCapacity", "Unsupported",
    "InsufficientFreeAddressesInSubnet", "MaxFleetCountExceeded", "ReservationCapacityExceeded",
})  # fmt: skip
TRANSIENT = frozenset({
    "RequestLimitExceeded", "Throttling", "ThrottlingException", "InternalError", "Unavailable",
    "ServiceUnavailable", "InternalFailure", "RequestTimeout", "EC2ThrottledException",
    "InvalidInstanceID.NotFound",  # of an instance that is not listed yet
})  # fmt: skip
IMAGE = "correct fleet.aws.images, or leave it out for AWS's own"
QUOTA = "ask for more in Service Quotas (EC2), or plan with allocation.quotas"
WAYS_OUT = {
    "InvalidAMIID.NotFound": IMAGE, "InvalidAMIID.Malformed": IMAGE,
    "InvalidAMIID.Unavailable": IMAGE,
    "VcpuLimitExceeded": QUOTA, "MaxSpotInstanceCountExceeded": QUOTA,
}  # fmt: skip


@contextmanager
def raised_by(action: str, region: str, quiet: Sequence[str] = ()) -> Iterator[None]:
    """Raise what goes wrong inside as one of the three errors that fleets have."""
    try:
        yield
    except (NoCapacityError, TransientError, FatalError):
        raise
    except CoralError as error:
        raise FatalError(str(error)) from error
    except Exception as error:
        code = code_of(error)
        if code in quiet:
            return
        if code in NO_CAPACITY:
            raise NoCapacityError(f"no capacity in {region}: {message_of(error)}") from error
        if code in TRANSIENT:
            raise TransientError(f"{action} in {region}: {message_of(error)}") from error
        known = explain(error, action, region, datetime.now(UTC))
        if isinstance(known, ThrottledError | UnreachableError):
            raise TransientError(str(known)) from error
        raise FatalError(f"{known}{_way_out(code)}") from error


def message_of(error: Exception) -> str:
    """Code and sentence."""
    response = getattr(error, "response", None) or {}
    code = code_of(error)
    return f"{code}: {response.get('Error', {}).get('Message', error)}{_way_out(code)}"


def _way_out(code: str) -> str:
    return f"; {WAYS_OUT[code]}" if code in WAYS_OUT else ""

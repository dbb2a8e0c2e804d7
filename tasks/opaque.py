"""Parameters that Prefect must not look into."""

from __future__ import annotations

from typing import TypeVar, cast

from prefect.utilities.annotations import quote

T = TypeVar("T")


def opaque(value: T) -> T:
    """Spare Prefect the search for futures inside a large value; the task gets it as it is."""
    return cast(T, quote(value))

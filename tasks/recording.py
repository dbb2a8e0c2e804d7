"""Whether a Prefect server keeps what runs: if none does, flows and tasks are plain calls.

Prefect itself would start a server for every command and end it again, which costs ten seconds of a
core, and nobody would look at what it kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect.flows import Flow
from prefect.settings import get_current_settings

P = ParamSpec("P")
R = TypeVar("R")


def server_url() -> str | None:
    """Of the server that keeps runs: PREFECT_API_URL, or as the user's Prefect profile says."""
    return get_current_settings().api.url or None


class _CoralFlow(Flow[P, R]):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.fn if server_url() is None else super().__call__
        return call(*args, **kwargs)


def coral_flow(
    name: str, timeout_seconds: float | None = None
) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """A flow, run by Prefect where a server keeps it; the time-out holds there alone."""

    def made(function: Callable[P, R]) -> Flow[P, R]:
        return _CoralFlow(
            function, name=name, validate_parameters=False, timeout_seconds=timeout_seconds
        )

    return made

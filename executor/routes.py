"""Where requests of each model go: written by the controller, read by gateways.

A route file lists only replicas that answer; a gateway that finds a replica gone from it sends no
more requests there, and only then is the replica stopped.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from executor.files import UnreadableError, read_model, write_model
from planner.errors import CoralError
from planner.types import Phase


class RoutesError(CoralError):
    """A route file that can't be read."""


class Route(BaseModel):
    """One replica that answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replica_id: str
    model: str
    phase: Phase
    urls: tuple[str, ...]  # one per engine of the replica
    weight: float = Field(default=1.0, gt=0.0)
    domain: str = ""  # KV moves inside one alone
    template_id: str = ""  # of the replica; '': of none that is known


class Objective(BaseModel):
    """What the plan promises of a model; of several workloads' objectives the tightest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_ms: float = Field(gt=0.0)
    tpot_ms: float = Field(gt=0.0)


class Routes(BaseModel):
    """All of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: tuple[str, ...] = ()  # all that the deployment serves, also those without a replica now
    routes: tuple[Route, ...] = ()
    objectives: dict[str, Objective] = Field(default_factory=dict)  # by model


def read_routes(path: Path) -> Routes:
    """The file; no routes where there is none yet.

    Raises RoutesError: not a route file.
    """
    try:
        return read_model(path, Routes)
    except UnreadableError as error:
        raise RoutesError(f"{path} is not a route file of Coral ({error})") from error


def write_routes(path: Path, routes: Routes) -> None:
    """Whole or not at all."""
    write_model(path, routes)

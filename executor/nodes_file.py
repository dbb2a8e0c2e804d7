"""Nodes that made their keys themselves and were let in: written by the controller alone.

It is what a controller that comes back knows of them, and what rounds read: since when a node's
agent is there, whether it is silent, and how long each part of its start-up took.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from executor.files import UnreadableError, read_model, write_model
from planner.leases import Lease


@dataclass(frozen=True, slots=True)
class StartUp:
    """How long one node took until its first replica answered."""

    lease_id: str
    at: datetime
    domain: str
    instance_type: str
    boot_s: float
    install_s: float
    weights_s: float
    engine_s: float

    @property
    def total_s(self) -> float:
        return self.boot_s + self.install_s + self.weights_s + self.engine_s


log = logging.getLogger(__name__)


class Node(BaseModel):
    """One node, by its lease."""

    model_config = ConfigDict(frozen=True)

    public_key: str
    instance_id: str
    address: str  # of its own network
    enrolled_at: datetime
    silent_s: float = 0.0
    boot_s: float | None = None  # from the cloud's launch to the first line of its user data
    install_s: float | None = None  # of agent and engine
    weights_s: float | None = None  # of its first stage's layers; 0: they were there
    engine_s: float | None = None  # from then until the replica answered

    def start_up(self, lease: Lease) -> StartUp | None:
        """Once all of it is known."""
        parts = [self.boot_s, self.install_s, self.weights_s, self.engine_s]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return StartUp(lease.id, self.enrolled_at, lease.domain, lease.instance_type, *known)


class Nodes(BaseModel):
    """By lease id."""

    model_config = ConfigDict(frozen=True)

    nodes: dict[str, Node] = Field(default_factory=dict)


def read_nodes(path: Path) -> Nodes:
    """The file; none where it is not there, or, which is said, not whole."""
    try:
        return read_model(path, Nodes)
    except UnreadableError as error:
        log.error("%s: %s; the nodes that it names are not known any more", path, error)
        return Nodes()


def write_nodes(path: Path, nodes: Nodes) -> None:
    """Whole or not at all."""
    write_model(path, nodes)

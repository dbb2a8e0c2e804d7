"""Notices of nodes that are about to go, from the controller to the next round."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from executor.files import UnreadableError, read_model, write_model


class NodeNotice(BaseModel):
    """What one node was told."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["spot", "rebalance"]
    at: datetime


class Notices(BaseModel):
    """By lease id."""

    model_config = ConfigDict(frozen=True)

    nodes: dict[str, NodeNotice] = Field(default_factory=dict)


def read_notices(path: Path) -> Notices:
    """The file; none where it is not there, or not whole."""
    try:
        return read_model(path, Notices)
    except UnreadableError:
        return Notices()


def write_notices(path: Path, notices: Notices) -> None:
    """Whole or not at all."""
    write_model(path, notices)

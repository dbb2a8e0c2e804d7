"""Where Coral keeps its state: one home folder."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from catalog.store import Catalog


def resolve_home(home: str | None = None) -> Path:
    """The folder named, or CORAL_HOME, or the user's data folder (~/.local/share/coral)."""
    named = home or os.environ.get("CORAL_HOME")
    return Path(named).expanduser() if named else platformdirs.user_data_path("coral")


def open_catalog(home: str | None = None) -> Catalog:
    """The catalog of a home folder; nothing is touched yet."""
    return Catalog(resolve_home(home))

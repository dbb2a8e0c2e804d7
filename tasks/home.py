"""Where Coral keeps its state: one home folder."""

from __future__ import annotations

from catalog.store import Catalog
from executor.home import resolve_home

__all__ = ["open_catalog", "resolve_home"]


def open_catalog(home: str | None = None) -> Catalog:
    """The catalog of a home folder; nothing is touched yet."""
    return Catalog(resolve_home(home))

"""Homes with the library of the smallest scenario."""

from __future__ import annotations

from pathlib import Path

import pytest

from catalog.store import Catalog
from tests.support.library import catalog_with


@pytest.fixture
def tiny(tiny_library: Path, tmp_path: Path) -> Catalog:
    """A home with them."""
    return catalog_with(tiny_library, tmp_path)

"""Homes with the library of the smallest scenario."""

from __future__ import annotations

from pathlib import Path

import pytest

from catalog.store import Catalog
from tests.support.library import build_library, catalog_with
from tests.support.rounds import spec


@pytest.fixture(scope="session")
def tiny_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with the templates of tiny, built once."""
    return build_library(tmp_path_factory.mktemp("tiny-library"), spec())


@pytest.fixture
def tiny(tiny_library: Path, tmp_path: Path) -> Catalog:
    """A home with them."""
    return catalog_with(tiny_library, tmp_path)

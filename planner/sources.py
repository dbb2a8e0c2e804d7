"""Which version of some source files this is."""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest_of_sources(folder: Path) -> str:
    """Short content hash of all Python files in a folder and below it."""
    digest = hashlib.sha256()
    for source in sorted(folder.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]

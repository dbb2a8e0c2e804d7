"""How the placement kernels are compiled and where the machine code is kept.

numba's own place, beside the source, breaks when an upgrade leaves old machine code there whose
types have other names. So it is kept per version of the source, in the user's cache folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import njit
from platformdirs import user_cache_path

Function = TypeVar("Function", bound=Callable[..., Any])

_SOURCE = Path(__file__).with_name("kernels.py")


def _cache_folder() -> str | None:
    """The folder of this version; None leaves the choice to numba."""
    base = Path(numba.config.CACHE_DIR) if numba.config.CACHE_DIR else user_cache_path("coral")
    folder = base / f"kernels-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder)


def compiled(function: Function) -> Function:
    """Compile for speed, once per machine.

    Without numba's reference counts, which cost more than the arithmetic in functions this small:
    so a compiled function may not allocate, and all work space comes from its caller.
    """
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _FOLDER or before
    try:
        made: Function = njit(cache=True, _nrt=False)(function)
    finally:
        numba.config.CACHE_DIR = before
    return made


_FOLDER = _cache_folder()

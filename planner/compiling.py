"""How numba kernels are compiled and where their machine code is kept.

numba's own place, beside each source file, goes wrong twice: it does not see that a function of
another file changed, and an upgrade can leave machine code whose types have other names. So the
code is kept per version of all sources of a folder, in the user's cache folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from platformdirs import user_cache_path

from planner.sources import digest_of_sources

Function = TypeVar("Function", bound=Callable[..., Any])

_config: Any = numba.config
_njit: Any = numba.njit


def compiler_of(sources: Path, *, entry: bool) -> Callable[[Function], Function]:
    """A decorator that compiles for speed, once per machine and version of a folder's sources.

    `entry`: Python calls the function. The others have no way in from Python: unpacking records of
    dozens of arrays takes longer to compile than all the rest (the simulator: 83 s, without 26 s).

    Without Python's lock, so that a Dask worker can answer its scheduler; and without numba's
    reference counts, which cost more than the arithmetic in functions this small:
    so a compiled function may not allocate, and all work space comes from its caller.
    """
    folder = cache_folder(sources)

    def compiled(function: Function) -> Function:
        before = _config.CACHE_DIR
        _config.CACHE_DIR = folder
        try:
            made: Function = _njit(
                cache=folder is not None,
                nogil=True,
                _nrt=False,
                no_cpython_wrapper=not entry,
                no_cfunc_wrapper=True,
            )(function)
        finally:
            _config.CACHE_DIR = before
        return made

    return compiled


def cache_folder(sources: Path) -> str | None:
    """The folder of this version; None where none can be written: compiled anew each time."""
    base = Path(_config.CACHE_DIR) if _config.CACHE_DIR else user_cache_path("coral")
    folder = base / f"kernels-{digest_of_sources(sources)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder)

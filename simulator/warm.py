"""Compile the event loop ahead of time, once per machine and version."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from planner.compiling import cache_folder
from simulator.kernels import types as k
from simulator.kernels.loop import run
from simulator.records import empty_state, engine_arrays, request_arrays, route_arrays
from simulator.trace import Trace


def is_compiled() -> bool:
    """Whether this version's machine code is kept on this machine."""
    folder = cache_folder(Path(k.__file__).parent)
    return folder is not None and any(Path(folder).rglob("loop.run-*.nbi"))


def warm() -> None:
    """Run no requests through no engines: the same code as any others."""
    none, numbers = np.zeros(0), np.zeros(0, dtype=np.int64)
    square, cube = np.zeros((0, 0)), np.zeros((0, 0, 0))
    tables = k.Tables(square, square, square, cube, cube, square, 1.0)
    static, lanes, stages, totals = engine_arrays([])
    routes = route_arrays([], [], [{}])
    requests = request_arrays(Trace((), none, numbers, numbers, numbers))
    state = empty_state([], static, routes, lanes, stages, totals, heap=1)
    run(tables, static, routes, k.Events(none, numbers, numbers), requests, state)


if __name__ == "__main__":
    warm()

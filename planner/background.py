"""A mixed integer program solved in a thread of its own, beside other searches for its solutions.

HiGHS releases Python's lock while it works. Its better solutions and its bound can be read at any
time, and a better solution from elsewhere can be handed in, so that it prunes with it.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Any, Self

import numpy as np

from planner.perf.grids import Floats
from planner.programs import Program, run_solver, set_up

log = logging.getLogger(__name__)


class BackgroundSolve:
    """A solve that runs until it is proven, out of time, or stopped; use it in a `with` block.

    `bound` is the best proven so far; `take` returns the best solution found since the last call.
    """

    def __init__(
        self, program: Program, relative_gap: float, time_limit_s: float, start: Floats | None
    ) -> None:
        self.bound = -np.inf
        self._found: Floats | None = None
        self._given: Floats | None = None
        self._stopped = False
        self.failure: Exception | None = None  # it found nothing more; the others go on
        self._lock = threading.Lock()
        self._solver = set_up(program, relative_gap=relative_gap, start=start)
        self._solver.cbMipImprovingSolution += self._on_better
        self._solver.cbMipInterrupt += self._on_interrupt
        self._solver.cbMipUserSolution += self._on_ask
        self._time_limit_s = time_limit_s
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped = True
        self._thread.join()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Until it ends, at most so long."""
        self._thread.join(max(0.0, seconds))

    def give(self, values: Floats) -> None:
        """A solution from elsewhere, taken when the solver next asks."""
        self._given = values

    def take(self) -> Floats | None:
        """The latest better solution that was not taken yet."""
        with self._lock:
            found, self._found = self._found, None
        return found

    def _run(self) -> None:
        try:
            answer = run_solver(self._solver, self._time_limit_s, is_mip=True)
        except Exception as error:
            log.warning("the solve beside the search ended: %s", error)
            self.failure = error
            return
        if answer.values is not None:
            with self._lock:
                self._found = answer.values
        self.bound = max(self.bound, answer.bound)

    def _on_better(self, event: Any) -> None:
        with self._lock:
            self._found = np.array(event.data_out.mip_solution)

    def _on_interrupt(self, event: Any) -> None:
        if np.isfinite(event.data_out.mip_dual_bound):
            self.bound = max(self.bound, float(event.data_out.mip_dual_bound))
        if self._stopped:
            event.interrupt()

    def _on_ask(self, event: Any) -> None:
        given, self._given = self._given, None
        if given is not None:
            event.data_in.setSolution(given)

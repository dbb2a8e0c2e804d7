"""The exact placement solver beside the ILP reference, on the same combinations in this process.

    python -m bench.placement --json

Draws combinations of the extended scenario: sizes 1 to 6, dense models and mixtures of experts,
all phases, floors of zero (the full optimum), one of each size and phase per round. `proven`: the
reference proved its optimum; only those are compared, `equal` if the throughputs differ by at most
0.1%. Each side keeps what it knows of a phase (the exact solver its tables, the reference its node
times) from one combination to the next; making the exact solver's tables is `tables_s`, and
`speedup_with_tables` charges them in full to these few combinations. `speedup` is that of sizes 4
and above.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bench.scenarios import inputs_of
from planner.placement.exact import ExactSolver
from planner.placement.search import best_placement
from planner.placement.stages import StageTable
from planner.types import Phase, describe_combination
from tasks.inputs import PhaseInputs

MODELS = ("Qwen3-14B", "Qwen3-30B-A3B", "Llama-3.3-70B-Instruct", "gpt-oss-120b")
TOLERANCE = 1e-3
LARGE = 4
DEEP = 4  # nodes beyond which the reference takes minutes
MAX_NODES = 6


@dataclass(frozen=True)
class Comparison:
    """Both solvers on one combination."""

    what: str
    size: int
    exact_s: float
    ilp_s: float
    exact_rps: float
    ilp_rps: float
    proven: bool

    @property
    def difference(self) -> float:
        return abs(self.exact_rps - self.ilp_rps) / max(self.ilp_rps, 1e-12)


@dataclass
class Sides:
    """Both solvers of one phase."""

    phase: PhaseInputs
    tables_s: float = 0.0
    _sizes: set[int] = field(default_factory=set)

    @cached_property
    def _exact(self) -> ExactSolver:
        return ExactSolver(self.phase.problem, MAX_NODES)

    @cached_property
    def _table(self) -> StageTable:
        return StageTable(self.phase.problem)

    def warm(self) -> None:
        """Run every compiled function once, on a solver that is thrown away."""
        level = self.phase.combinations.by_size[1][:4]
        ExactSolver(self.phase.problem, 2).solve(level, np.zeros(len(level)))

    def compare(self, row: NDArray[np.uint8]) -> Comparison:
        """Solve one combination with each."""
        if len(row) not in self._sizes:
            started = time.perf_counter()
            self._exact.solve(np.empty((0, len(row)), dtype=np.uint8), np.empty(0))
            self.tables_s += time.perf_counter() - started
            self._sizes.add(len(row))
        started = time.perf_counter()
        solved = self._exact.solve(row[None, :], np.zeros(1))
        exact_s = time.perf_counter() - started
        combination = self.phase.combinations.combination(row)
        started = time.perf_counter()
        reference = best_placement(self._table, combination)
        problem = self.phase.problem
        return Comparison(
            f"{problem.phase} {problem.workload} on {describe_combination(combination)}",
            len(row),
            exact_s,
            time.perf_counter() - started,
            float(solved.best_rps[0]),
            reference.placement.raw_rps if reference.placement else 0.0,
            reference.proven,
        )


def main() -> None:
    """Parse, run both solvers, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scenario", default="extended")
    parser.add_argument("--rounds", type=int, default=3, help="combinations of each size and phase")
    parser.add_argument("--deep-rounds", type=int, default=1, help="rounds with 5 and 6 nodes")
    parser.add_argument("--seconds", type=float, default=1800.0, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    inputs = inputs_of(options.scenario, MAX_NODES)
    rng = np.random.default_rng(options.seed)
    sides = [Sides(p) for p in inputs.phases if p.workload.name in MODELS]
    drawn = [
        {
            size: level[rng.permutation(len(level))[: options.rounds]]
            for size, level in enumerate(side.phase.combinations.by_size, start=1)
        }
        for side in sides
    ]
    for kind in Phase:  # compiles, where no earlier run left the machine code
        next(side for side in sides if side.phase.problem.phase is kind).warm()
    found: list[Comparison] = []
    started = time.perf_counter()
    for turn in range(options.rounds):
        for size in range(1, MAX_NODES + 1):
            for side, rows in zip(sides, drawn, strict=True):
                left = time.perf_counter() - started < options.seconds
                deep = size > DEEP and turn >= options.deep_rounds
                if left and not deep and turn < len(rows[size]):
                    found.append(side.compare(rows[size][turn]))
        print(f"round {turn + 1}: {len(found)} combinations", file=sys.stderr)
    proven = [c for c in found if c.proven]
    equal = [c for c in proven if c.difference <= TOLERANCE]
    for comparison in proven:
        if comparison.difference > TOLERANCE:
            print(f"differs: {comparison}", file=sys.stderr)
    large = [c for c in found if c.size >= LARGE]
    tables_s = sum(side.tables_s for side in sides)
    exact_s, ilp_s = sum(c.exact_s for c in large), sum(c.ilp_s for c in large)
    result = {
        "scenario": options.scenario,
        "combinations": len(found),
        "proven": len(proven),
        "equal": len(equal),
        "timed_out": len(found) - len(proven),
        "proven_by_size": {
            size: sum(c.size == size for c in proven) for size in range(1, MAX_NODES + 1)
        },
        "largest_difference": round(max((c.difference for c in proven), default=0.0), 6),
        "ilp_s": round(sum(c.ilp_s for c in found), 2),
        "exact_s": round(sum(c.exact_s for c in found), 3),
        "tables_s": round(tables_s, 2),
        "speedup": round(ilp_s / exact_s, 1),
        "speedup_with_tables": round(ilp_s / (exact_s + tables_s), 1),
    }
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()

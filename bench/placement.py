"""The exact placement solver beside the ILP reference, on the same combinations in this process.

    python -m bench.placement --json

Draws combinations of the extended scenario: sizes 1 to 6, dense models and mixtures of experts,
all phases, floors of zero (the full optimum). `proven`: the reference proved its optimum; only
those are compared, `equal` if the throughputs differ by at most 0.1%. `exact_s` counts solving
alone: tables that a phase makes once are in `tables_s`. `speedup` is that of sizes 4 and above.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass

import numpy as np

from bench.scenarios import inputs_of
from planner.placement.combinations import CombinationSet
from planner.placement.exact import ExactSolver
from planner.placement.search import best_placement
from planner.placement.stages import StageTable
from planner.types import describe_combination
from tasks.inputs import PhaseInputs

MODELS = ("Qwen3-14B", "Qwen3-30B-A3B", "Llama-3.3-70B-Instruct", "gpt-oss-120b")
TOLERANCE = 1e-3
LARGE = 4


@dataclass
class Side:
    """Seconds of both solvers, over all and over large combinations."""

    exact_s: float = 0.0
    ilp_s: float = 0.0


def main() -> None:
    """Parse, run both solvers, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scenario", default="extended")
    parser.add_argument("--per-size", type=int, default=3, help="combinations of each size, phase")
    parser.add_argument("--seconds", type=float, default=1800.0, help="stop drawing after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    inputs = inputs_of(options.scenario, 6)
    rng = np.random.default_rng(options.seed)
    whole, large = Side(), Side()
    tables_s, worst = 0.0, 0.0
    combinations = proven = equal = timed_out = 0
    phases = [phase for phase in inputs.phases if phase.workload.name in MODELS]
    started = time.perf_counter()
    for size in range(1, 7):
        for phase in phases:
            if time.perf_counter() - started > options.seconds:
                break
            tables_s += warm(phase)
            solver, table = ExactSolver(phase.problem, 6), StageTable(phase.problem)
            level = phase.combinations.by_size[size - 1]
            chosen = level[rng.permutation(len(level))[: options.per_size]]
            if not len(chosen):
                continue
            tables_s += first_call(solver, size)
            for row in chosen:
                exact_s, ilp_s, exact_rps, ilp_rps, sure = compare(solver, table, phase, row)
                combinations += 1
                timed_out += not sure
                for side in (whole, large) if size >= LARGE else (whole,):
                    side.exact_s += exact_s
                    side.ilp_s += ilp_s
                if sure:
                    proven += 1
                    error = abs(exact_rps - ilp_rps) / max(ilp_rps, 1e-12)
                    worst = max(worst, error)
                    equal += error <= TOLERANCE
                    if error > TOLERANCE:
                        names = CombinationSet(phase.problem.names, (chosen,)).combination(row)
                        print(f"differs: {phase.problem.phase} {phase.workload.name} on "
                              f"{describe_combination(names)}: {exact_rps} exact, {ilp_rps} ILP",
                              file=sys.stderr)  # fmt: skip
            print(f"size {size}, {phase.problem.phase} {phase.workload.name}: {proven} proven, "
                  f"{equal} equal", file=sys.stderr)  # fmt: skip
    result = {
        "scenario": options.scenario,
        "combinations": combinations,
        "proven": proven,
        "equal": equal,
        "timed_out": timed_out,
        "largest_difference": round(worst, 6),
        "ilp_s": round(whole.ilp_s, 2),
        "exact_s": round(whole.exact_s, 3),
        "tables_s": round(tables_s, 2),
        "speedup": round(large.ilp_s / large.exact_s, 1) if large.exact_s else None,
        "speedup_all_sizes": round(whole.ilp_s / whole.exact_s, 1),
    }
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


def warm(phase: PhaseInputs) -> float:
    """Compile, where no earlier run left the machine code; not counted as solving."""
    started = time.perf_counter()
    level = phase.combinations.by_size[-1][:1]
    if len(level) and phase.problem.phase not in _warmed:
        ExactSolver(phase.problem, 6).solve(level, np.zeros(1))
        _warmed.add(phase.problem.phase)
        return 0.0
    return time.perf_counter() - started


_warmed: set[str] = set()


def first_call(solver: ExactSolver, size: int) -> float:
    """Seconds of the tables that all combinations of a size share."""
    started = time.perf_counter()
    solver.solve(np.empty((0, size), dtype=np.uint8), np.empty(0))
    return time.perf_counter() - started


def compare(
    solver: ExactSolver, table: StageTable, phase: PhaseInputs, row: np.ndarray
) -> tuple[float, float, float, float, bool]:
    """Seconds of each solver, throughput of each, and whether the reference proved its own."""
    started = time.perf_counter()
    solved = solver.solve(row[None, :], np.zeros(1))
    exact_s = time.perf_counter() - started
    combination = CombinationSet(phase.problem.names, (row[None, :],)).combination(row)
    started = time.perf_counter()
    reference = best_placement(table, combination)
    ilp_s = time.perf_counter() - started
    rps = reference.placement.raw_rps if reference.placement else 0.0
    return exact_s, ilp_s, float(solved.best_rps[0]), rps, reference.proven


if __name__ == "__main__":
    main()

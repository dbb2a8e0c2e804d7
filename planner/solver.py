"""The one module that chooses a solver, its time limit and its gap.

PuLP's `status` says Optimal even for a time-limited incumbent, so outcomes are read from
`sol_status`; PuLP rewrites `-` in names, so callers number their variables.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import highspy
import pulp

from planner.errors import InfeasiblePlanError, SolverStoppedError


class Outcome(StrEnum):
    """What a solve proved."""

    PROVEN = "proven"  # within the gap asked for
    INCUMBENT = "incumbent"  # feasible; stopped before the proof
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True)
class SolveReport:
    """Objective, proven bound and relative gap |objective - bound| / |objective|."""

    outcome: Outcome
    objective: float
    bound: float
    gap: float


def solve(
    problem: pulp.LpProblem,
    *,
    time_limit_s: float | None = None,
    relative_gap: float = 1e-6,
    relax: bool = False,
    warm: bool = False,
) -> SolveReport:
    """Solve with HiGHS on one thread and say what was proven.

    `warm` starts from the values that the variables hold.
    Raises SolverStoppedError: no solution and no proof that there is none.
    """
    solver_class = _WarmHiGHS if warm else pulp.HiGHS
    for presolve in ("choose", "off"):  # HiGHS's presolve fails on a few tight programs
        # One thread: Dask workers share the cores, and the same inputs give the same answer.
        solver = solver_class(
            msg=False,
            mip=not relax,
            gapRel=relative_gap,
            timeLimit=time_limit_s,
            threads=1,
            presolve=presolve,
        )
        problem.solve(solver)
        match problem.sol_status:
            case pulp.LpSolutionOptimal | pulp.LpSolutionIntegerFeasible:
                return _report(problem, relax)
            case pulp.LpSolutionInfeasible:
                return SolveReport(Outcome.INFEASIBLE, float("inf"), float("inf"), 0.0)
        if problem.solverModel.getModelStatus() == highspy.HighsModelStatus.kTimeLimit:
            break
    raise SolverStoppedError(
        f"{problem.name}: the solver stopped without a solution "
        f"({problem.solverModel.modelStatusToString(problem.solverModel.getModelStatus())}); "
        "raise its time limit"
    )


def require_feasible(problem: pulp.LpProblem, report: SolveReport) -> SolveReport:
    """Raise InfeasiblePlanError where a model that always has a solution has none."""
    if report.outcome is Outcome.INFEASIBLE:
        raise InfeasiblePlanError(f"{problem.name}: no feasible solution, which cannot be")
    return report


class _WarmHiGHS(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS takes no start; hand it over between building the model and the run."""

    def callSolver(self, lp: pulp.LpProblem) -> None:  # noqa: N802
        start = highspy.HighsSolution()
        start.col_value = [float(variable.value() or 0.0) for variable in lp.variables()]
        lp.solverModel.setSolution(start)
        lp.solverModel.run()


def _report(problem: pulp.LpProblem, relax: bool) -> SolveReport:
    info: Any = problem.solverModel.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        raise SolverStoppedError(
            f"{problem.name}: the time limit passed before any solution was found; raise it"
        )
    objective = float(pulp.value(problem.objective) or 0.0)
    # A linear program has no dual bound of its own: its optimum is the bound.
    bound = float(info.mip_dual_bound) if not relax and problem.isMIP() else objective
    gap = abs(objective - bound) / abs(objective) if objective else abs(bound)
    proven = problem.sol_status == pulp.LpSolutionOptimal
    return SolveReport(Outcome.PROVEN if proven else Outcome.INCUMBENT, objective, bound, gap)

"""The one module that chooses a solver, its time limit and its gap.

PuLP's `status` says Optimal even for a time-limited incumbent, so outcomes are read from
`sol_status`; PuLP rewrites `-` in names, so callers number their variables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import highspy
import numpy as np
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
    improved: Callable[[], None] | None = None,
) -> SolveReport:
    """Solve with HiGHS on one thread and say what was proven.

    `warm` starts from the values that the variables hold; `improved` is called at every better
    integer solution.
    Raises SolverStoppedError: no solution and no proof that there is none.
    """
    for presolve in ("choose", "off"):  # HiGHS's presolve fails on a few tight programs
        # One thread: Dask workers share the cores, and the same inputs give the same answer.
        solver = _HiGHS(
            msg=False,
            mip=not relax,
            gapRel=relative_gap,
            timeLimit=time_limit_s,
            threads=1,
            presolve=presolve,
        )
        solver.warm, solver.improved = warm, improved
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


class _HiGHS(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS with the model handed over in arrays and, if asked, a start.

    PuLP adds columns and rows one call at a time, which takes longer than solving small programs,
    and it takes no start.
    """

    warm = False
    improved: Callable[[], None] | None = None

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:  # noqa: N802
        variables, constraints = lp.variables(), list(lp.constraints.values())
        for index, variable in enumerate(variables):
            variable.index = index
        sign = -1.0 if lp.sense == pulp.LpMaximize else 1.0
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(variables), len(constraints)
        model.col_cost_ = np.array([sign * lp.objective.get(v, 0.0) for v in variables])
        model.col_lower_ = np.array([_or(v.lowBound, -highspy.kHighsInf) for v in variables])
        model.col_upper_ = np.array([_or(v.upBound, highspy.kHighsInf) for v in variables])
        if self.mip:
            kinds = highspy.HighsVarType
            model.integrality_ = [
                kinds.kInteger if v.cat == pulp.LpInteger else kinds.kContinuous for v in variables
            ]
        starts, columns, values = [0], [], []
        for index, constraint in enumerate(constraints):
            constraint.index = index
            for variable, value in constraint.items():
                columns.append(variable.index)
                values.append(value)
            starts.append(len(columns))
        model.row_lower_ = np.array([_or(c.getLb(), -highspy.kHighsInf) for c in constraints])
        model.row_upper_ = np.array([_or(c.getUb(), highspy.kHighsInf) for c in constraints])
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(starts)
        model.a_matrix_.index_ = np.array(columns, dtype=np.int32)
        model.a_matrix_.value_ = np.array(values, dtype=float)
        lp.solverModel.passModel(model)

    def callSolver(self, lp: pulp.LpProblem) -> None:  # noqa: N802
        if self.warm:
            start = highspy.HighsSolution()
            start.col_value = [float(variable.value() or 0.0) for variable in lp.variables()]
            lp.solverModel.setSolution(start)
        if (improved := self.improved) is not None:
            lp.solverModel.cbMipImprovingSolution += lambda _: improved()
        lp.solverModel.run()


def _or(bound: float | None, unbounded: float) -> float:
    return unbounded if bound is None else float(bound)


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

"""Linear and mixed integer programs as arrays, solved by HiGHS: for programs of many columns.

Small programs are written in PuLP (`solver.py`); these have tens of thousands of columns, of which
a few are solved for at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from planner.errors import SolverStoppedError
from planner.perf.grids import Floats

Rows = NDArray[np.intp]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Program:
    """Minimise cost x with row_lower <= matrix x <= row_upper and lower <= x <= upper."""

    matrix: sparse.csc_array
    cost: Floats
    lower: Floats
    upper: Floats
    row_lower: Floats
    row_upper: Floats
    integer: Flags

    @property
    def columns(self) -> int:
        return int(self.cost.size)

    def of_columns(self, chosen: Rows) -> Program:
        """The same rows over some columns; the others are zero."""
        return replace(
            self,
            matrix=self.matrix[:, chosen],
            cost=self.cost[chosen],
            lower=self.lower[chosen],
            upper=self.upper[chosen],
            integer=self.integer[chosen],
        )

    def of_rows(self, chosen: Rows | Flags) -> Program:
        """Some of the rows."""
        return replace(
            self,
            matrix=self.matrix[chosen],
            row_lower=self.row_lower[chosen],
            row_upper=self.row_upper[chosen],
        )

    def given(self, values: Floats) -> Program:
        """The same rows after others' columns have taken so much of them."""
        return replace(self, row_lower=self.row_lower - values, row_upper=self.row_upper - values)


@dataclass(frozen=True)
class Answer:
    """What a solve came to; `values` is None where no solution was found."""

    values: Floats | None
    objective: float
    bound: float  # infinite where it is proven that there is no solution
    proven: bool  # within the gap asked for
    duals: Floats  # of rows; of linear programs only


def solve_program(
    program: Program,
    *,
    time_limit_s: float | None = None,
    relative_gap: float = 1e-6,
    relax: bool = False,
    start: Floats | None = None,
) -> Answer:
    """Solve on one thread; `start` holds values of all columns to begin from."""
    solver = set_up(program, relax=relax, relative_gap=relative_gap, start=start)
    return run_solver(solver, time_limit_s, is_mip=not relax and bool(program.integer.any()))


class LinearProgram:
    """A linear program that grows by columns and starts again from its last basis."""

    def __init__(self, program: Program) -> None:
        self.columns = program.columns
        self._solver = set_up(program, relax=True)
        rows = zip(program.row_lower.tolist(), program.row_upper.tolist(), strict=True)
        self._rows = dict(enumerate(rows))

    def add_columns(self, program: Program) -> None:
        """Columns with the same rows."""
        matrix = program.matrix
        self._solver.addCols(
            program.columns, program.cost, program.lower, program.upper, matrix.nnz,
            matrix.indptr[:-1].astype(np.int32), matrix.indices.astype(np.int32), matrix.data,
        )  # fmt: skip
        self.columns += program.columns

    def change(self, program: Program, columns: Rows) -> None:
        """Costs and bounds of a program with the same matrix, of which it has these columns."""
        numbers = np.arange(columns.size, dtype=np.int32)
        solver, chosen = self._solver, program.cost[columns]
        solver.changeColsCost(columns.size, numbers, chosen)
        lower, upper = program.lower[columns], program.upper[columns]
        solver.changeColsBounds(columns.size, numbers, lower, upper)
        limits = zip(program.row_lower.tolist(), program.row_upper.tolist(), strict=True)
        for row, (least, most) in enumerate(limits):
            if (least, most) != self._rows[row]:
                solver.changeRowBounds(row, least, most)
                self._rows[row] = (least, most)

    def solve(self) -> Answer:
        return run_solver(self._solver, None, is_mip=False)


def set_up(
    program: Program,
    *,
    relax: bool = False,
    relative_gap: float = 1e-6,
    start: Floats | None = None,
) -> Any:
    """HiGHS with the program in it, on one thread."""
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_allow_restart", False)  # programs here are short of time
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = program.columns, program.row_lower.size
    model.col_cost_ = program.cost
    model.col_lower_, model.col_upper_ = program.lower, program.upper
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    if not relax and program.integer.any():
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[flag] for flag in program.integer.tolist()]
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = program.matrix.indptr
    model.a_matrix_.index_ = program.matrix.indices
    model.a_matrix_.value_ = program.matrix.data
    solver.passModel(model)
    solver.setOptionValue("mip_rel_gap", relative_gap)
    if start is not None:
        first = highspy.HighsSolution()
        first.col_value = start.tolist()
        solver.setSolution(first)
    return solver


def run_solver(solver: Any, time_limit_s: float | None, *, is_mip: bool) -> Answer:
    """Solve what is set up, and read the answer.

    Raises SolverStoppedError: the solver failed (which a time limit or an interrupt is not).
    """
    if time_limit_s is not None:  # HiGHS refuses a negative limit, and then has none
        solver.setOptionValue("time_limit", solver.getRunTime() + max(0.0, time_limit_s))
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    statuses = highspy.HighsModelStatus
    infeasible = status in {statuses.kInfeasible, statuses.kUnboundedOrInfeasible}
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    stopped = {statuses.kTimeLimit, statuses.kInterrupt, statuses.kSolutionLimit}
    if not found and not infeasible and status not in stopped:
        raise SolverStoppedError(
            f"the solver failed on a program of {solver.getNumCol()} columns "
            f"({solver.modelStatusToString(status)})"
        )
    solution = solver.getSolution()
    objective = float(info.objective_function_value) if found else float("inf")
    return Answer(
        values=np.array(solution.col_value) if found else None,
        objective=objective,
        bound=float(info.mip_dual_bound) if is_mip and not infeasible else objective,
        proven=status == statuses.kOptimal,
        duals=np.array(solution.row_dual),
    )

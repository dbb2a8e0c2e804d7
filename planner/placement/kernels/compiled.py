"""The decorators of the kernels in this folder: those that Python calls, and the others."""

from __future__ import annotations

from pathlib import Path

from planner.compiling import compiler_of

compiled = compiler_of(Path(__file__).parent, entry=False)
entry = compiler_of(Path(__file__).parent, entry=True)

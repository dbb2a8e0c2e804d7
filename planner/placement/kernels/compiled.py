"""The decorator of every kernel in this folder."""

from __future__ import annotations

from pathlib import Path

from planner.compiling import compiler_of

compiled = compiler_of(Path(__file__).parent)

"""What a simulation refuses."""

from __future__ import annotations

from planner.errors import InputError


class TraceError(InputError):
    """A trace that cannot be: out of order, negative lengths, unknown models."""


class SimulationError(InputError):
    """A fleet or setting that cannot be simulated."""

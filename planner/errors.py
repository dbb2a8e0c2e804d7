"""Named errors: one sentence that names the thing and the way out.

An `InputError` means that what the user gave is wrong or impossible (exit code 2); any other
`CoralError` means that something outside the input failed (exit code 1).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CoralError(Exception):
    """Base of every error that Coral raises on purpose."""

    exit_code = 1


class InputError(CoralError):
    """The input is wrong or impossible."""

    exit_code = 2


class ScenarioError(InputError):
    """A scenario file says something that cannot be."""


class UnknownNameError(InputError):
    """A name that the catalog does not have; suggests the nearest ones that it has."""

    def __init__(self, kind: str, name: str, known: Iterable[str], where: str = "") -> None:
        options = sorted({str(option) for option in known})
        near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
        if not near:  # a bare GPU or model name inside a longer one: 'H100' in 'H100 x8'
            near = [option for option in options if name.lower() in option.lower()][:1]
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(options[:12])}"
        place = f" in {where}" if where else ""
        super().__init__(f"unknown {kind} {name!r}{place}; {hint}")
        self.kind, self.name = kind, name


class MissingProfileError(InputError):
    """No measured table and no roofline for a (model, dtype, GPU)."""


class ImpossibleSloError(InputError):
    """No template of a workload meets its latency objective."""


class NoTemplateError(InputError):
    """A workload has demand but no combination of nodes can hold its model."""


class MarketError(InputError):
    """A price or stock that no plan may use."""


class InfeasiblePlanError(CoralError):
    """A model that must have a solution has none: a defect, never a user's mistake."""


class SolverStoppedError(CoralError):
    """The solver ended without any solution (time limit or a failure of its own)."""


class LeastServedError(InputError):
    """A workload's least served share is more than any plan can serve."""

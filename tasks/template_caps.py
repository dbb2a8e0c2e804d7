"""How full one replica of a template may be, by simulation of it alone.

Source: docs/formulation.md, section 10, Calibration of the caps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from catalog.reads import StoredFleet
from planner.types import Phase, Template
from tasks.inputs import Inputs
from tasks.requests import History, Load
from tasks.simulation import simulate_fleet

REQUESTS = 3000  # of one simulation: a share of 95% within 0.4%
LEAST_CAP, MOST_CAP = 0.05, 1.0
WIDTH = 1.03  # ratio of bracket ends at which a bisection stops
DECODE_MISSES = 0.2
EASE = 10.0  # times the load that counterparts could take, so that they do not count
MOST_COUNTERPARTS = 64
HERE = "here"  # the domain


@dataclass(frozen=True)
class Bench:
    """What every simulation of one calibration has in common."""

    inputs: Inputs
    library: Sequence[Template]  # with the assumed caps
    histories: Mapping[str, History]
    load: Load
    target: float

    def full_rps(self, template: Template, workload: str) -> float:
        """Without a cap."""
        assumed = self.inputs.scenario.placement.utilization[template.phase]
        return template.serves[workload] / assumed

    def phase_target(self, phase: Phase) -> float:
        """Of both phases prefill may miss all that the two may, decode a fifth of it."""
        return 1.0 - (1.0 - self.target) * (DECODE_MISSES if phase is Phase.DECODE else 1.0)


def template_cap(bench: Bench, template: Template, workload: str) -> float:
    """Largest share of its throughput at which the workload's requests are in time; 0: none is.

    Bisection between LEAST_CAP and MOST_CAP. Requests are judged whole; prefill and decode have
    counterparts with ten times the room beside them.
    """
    low, high = LEAST_CAP, MOST_CAP
    if not attains(bench, template, workload, low):
        return 0.0
    while high / low > WIDTH:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if attains(bench, template, workload, middle) else (low, middle)
    return low


def attains(bench: Bench, template: Template, workload: str, cap: float) -> bool:
    """Whether one replica at that share of its throughput is in time."""
    rate = cap * bench.full_rps(template, workload)
    fleet = {(template.id, HERE): 1}
    templates = {template.id: template}
    if template.phase is not Phase.AGGREGATED:
        other = _counterpart(bench, template, workload)
        wanted = math.ceil(EASE * rate / bench.full_rps(other, workload))
        fleet[other.id, HERE] = min(MOST_COUNTERPARTS, wanted)
        templates[other.id] = other
    stored = StoredFleet(
        "", 0.0, fleet, {key: {workload: rate} for key in fleet}, {workload: rate}, {workload: rate}
    )
    load = replace(bench.load, factor=1.0, minutes=REQUESTS / rate / 60.0)
    found = simulate_fleet(bench.inputs, templates, stored, load, bench.histories)
    (measures,) = (each for each in found.simulated if each.workload == workload)
    return measures.requests > 0 and measures.attainment >= bench.phase_target(template.phase)


def _counterpart(bench: Bench, template: Template, workload: str) -> Template:
    """The template of the other phase that serves most of the workload."""
    other = Phase.DECODE if template.phase is Phase.PREFILL else Phase.PREFILL
    return max(
        (each for each in bench.library if each.phase is other and workload in each.serves),
        key=lambda each: each.serves[workload],
    )

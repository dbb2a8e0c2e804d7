"""Every planner's plan under the same requests, in simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.allocation.plan import Plan
from tasks.comparison_view import Line
from tasks.fleet_engines import fleet_of_plan
from tasks.inputs import Inputs
from tasks.requests import Load
from tasks.simulation import simulate_fleet


def served_in_simulation(
    inputs: Inputs | None, line: Line, plans: Sequence[Plan], minutes: float
) -> Line:
    """A line with the attainment and goodput of its plans: Poisson requests at what they serve.

    What a plan leaves unserved is turned away. Of several plans (orders) the mean. Without minutes
    or inputs the line stays as it is.
    """
    if not minutes or inputs is None:
        return line
    goodput = good = total = 0.0
    for plan in plans:
        fleet = fleet_of_plan(plan)
        if not fleet.replicas or not sum(fleet.served_rps.values()):
            continue
        templates = {planned.template.id: planned.template for planned in plan.replicas}
        found = simulate_fleet(
            inputs, templates, fleet, Load(minutes=minutes), {}, fleet.served_rps
        )
        goodput += found.goodput_tokens_per_s
        requests = sum(measured.requests for measured in found.simulated)
        good, total = good + found.attainment * requests, total + requests
    return replace(
        line,
        attainment=good / total if total else None,
        goodput_tokens_per_s=goodput / len(plans) if plans else 0.0,
    )

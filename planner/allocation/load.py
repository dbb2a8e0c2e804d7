"""Who serves what, once the replicas are chosen: a small linear program on the integers.

The integer program leaves loads at any corner; routers want equally busy replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pulp

from planner.allocation.limits import least_served_limit
from planner.allocation.problem import AllocationInput, LoadKey
from planner.solver import require_feasible, solve
from planner.types import DISAGGREGATED, Phase

SHORTFALL_WEIGHT = 1e6  # an unserved share of the demand outweighs any egress
EGRESS_WEIGHT = 1e2  # a cent of egress per hour outweighs any imbalance
NEGLIGIBLE = 1e-9


@dataclass(frozen=True, slots=True)
class SharedLoad:
    """Requests/s by (workload, template index, domain), and served by workload."""

    load_rps: Mapping[LoadKey, float]
    served_rps: Mapping[str, float]
    egress_usd_per_hour: float


def share_load(data: AllocationInput, counts: Mapping[tuple[int, str], int]) -> SharedLoad:
    """Serve as much as these replicas can, each as busy as the others where possible.

    Minimise   1e6 sum weight short[w] / weighted demand + 100 egress (USD/hour) + u
    Such that  sum over w of z[w, t, r] / T[t, w] <= u x[t, r], u <= 1      (A4)
               z prefill = z decode = q, served + short = demand           (A5, A6)
               q + aggregated z of (w, r) <= share x demand[w]             (A9)
               short[w] <= (1 - least served) demand[w]                    (A11)

    Raises InfeasiblePlanError where these replicas can't keep A11.
    """
    problem = pulp.LpProblem("load", pulp.LpMinimize)
    busiest = pulp.LpVariable("busiest", 0, 1)
    load: dict[LoadKey, pulp.LpVariable] = {}
    for number, ((index, domain), count) in enumerate(sorted(counts.items())):
        serves = data.templates[index].serves
        names = [
            w.name
            for w in data.workloads
            if serves.get(w.name, 0.0) > 0 and data.may_serve(w.name, domain)
        ]
        for position, name in enumerate(names):
            load[name, index, domain] = pulp.LpVariable(f"load_{number}_{position}", 0)
        busy = pulp.lpSum(load[name, index, domain] / serves[name] for name in names)
        problem += busy <= count * busiest, f"A4_{number}"
    short = []
    egress: list[pulp.LpAffineExpression] = []
    served: dict[str, pulp.LpAffineExpression] = {}
    for number, workload in enumerate(data.workloads):
        least = data.rules_of(workload.name).least_served
        most = least_served_limit(workload, least).amount if least else workload.demand_rps
        missing = pulp.LpVariable(f"short_{number}", 0, most)
        short.append(workload.weight * missing)
        places = []
        for position, domain in enumerate(data.domains):
            by_phase = {
                phase: pulp.lpSum(
                    variable
                    for (name, index, where), variable in load.items()
                    if (name, where) == (workload.name, domain)
                    and data.templates[index].phase is phase
                )
                for phase in Phase
            }
            prefill, decode = (by_phase[phase] for phase in DISAGGREGATED)
            problem += prefill - decode == 0, f"A5_{number}_{position}"
            here = decode + by_phase[Phase.AGGREGATED]
            largest = data.rules_of(workload.name).largest_domain_share
            if largest < 1.0:
                problem += here <= largest * workload.demand_rps, f"A9_{number}_{position}"
            places.append(here)
            egress.append(3600.0 * data.egress_usd_per_request(workload, domain) * here)
        served[workload.name] = pulp.lpSum(places)
        problem += served[workload.name] + missing == workload.demand_rps, f"A6_{number}"
    weight = SHORTFALL_WEIGHT / max(data.weighted_demand, NEGLIGIBLE)
    problem += weight * pulp.lpSum(short) + EGRESS_WEIGHT * pulp.lpSum(egress) + busiest
    require_feasible(problem, solve(problem, relax=True))
    return SharedLoad(
        {key: rps for key, v in load.items() if (rps := v.value() or 0.0) > NEGLIGIBLE},
        {
            w.name: _rounded(float(pulp.value(served[w.name]) or 0.0), w.demand_rps)
            for w in data.workloads
        },
        float(pulp.value(pulp.lpSum(egress)) or 0.0),
    )


def _rounded(served_rps: float, demand_rps: float) -> float:
    """All of the demand where only the solver's tolerance is missing."""
    return demand_rps if demand_rps - served_rps <= 1e-6 * demand_rps else max(0.0, served_rps)

"""What a round of operation has to be told of: shortfall, spend near the cap, stale prices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from catalog.store import Catalog
from planner.scenario import ScenarioSpec
from tasks.coral_task import coral_task
from tasks.events import MARKET_STALE, SHORTFALL, SPEND_NEAR_CAP, tell
from tasks.inputs import Inputs
from tasks.operating import Round, lease_store

SERVED_IN_FULL = 0.9999  # of the demand: solvers round
NEAR_CAP = 0.9  # of fleet.max_usd_per_hour


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing that somebody should look at."""

    event: str
    what: str


def alarms_of(
    spec: ScenarioSpec, inputs: Inputs, result: Round, usd_per_hour: float
) -> list[Alarm]:
    """All of a round; a plan that stays has been told of when it was made.

    `usd_per_hour` is what the cap counts: nodes that are not over, at their launch prices.
    """
    return list(_alarms(spec, inputs, result, usd_per_hour))


def _alarms(
    spec: ScenarioSpec, inputs: Inputs, result: Round, usd_per_hour: float
) -> Iterator[Alarm]:
    plan = result.decision.coral if result.decision is not None else None
    if plan is not None and plan.served_share < SERVED_IN_FULL:
        short = ", ".join(
            f"{s.workload} {s.served_rps:.3g} of {s.demand_rps:.3g} requests/s"
            for s in plan.services
            if s.served_rps < SERVED_IN_FULL * s.demand_rps
        )
        yield Alarm(SHORTFALL, f"{plan.served_share:.1%} of the demand is served: {short}")
    cap = spec.fleet.max_usd_per_hour
    if cap is not None and usd_per_hour >= NEAR_CAP * cap:
        yield Alarm(SPEND_NEAR_CAP, f"${usd_per_hour:.2f}/h of at most ${cap:.2f}/h is spent")
    stale = [feed.note for feed in inputs.feeds if feed.note]
    if stale:
        yield Alarm(MARKET_STALE, "; ".join(stale))


def raise_alarms(
    catalog: Catalog, spec: ScenarioSpec, inputs: Inputs, result: Round
) -> list[Alarm]:
    """Tell the Prefect server; `coral alerts` says whom it tells."""
    name = inputs.scenario.name
    leases = [x for x in lease_store(catalog).all() if x.scenario == name]
    rent = sum(lease.price_usd_per_hour for lease in leases if not lease.state.is_over)
    found = alarms_of(spec, inputs, result, rent)
    for alarm in found:
        tell(alarm.event, "scenario", name, what=alarm.what)
    return found


raise_alarms_task = coral_task("raise-alarms", raise_alarms)

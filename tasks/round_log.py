"""One log line for a round of operation and one for every change of a node in it, with ids.

Under a Prefect worker they go to the run's logs (prefect.yaml); with CORAL_LOG_FORMAT=json they
are printed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from prefect.runtime import flow_run

from catalog.store import Catalog
from tasks.alarms import Alarm
from tasks.lease_copy import LeaseEvent
from tasks.operating import Round, lease_store

log = logging.getLogger("coral.rounds")


def log_round(
    catalog: Catalog,
    scenario: str,
    result: Round,
    events: Sequence[LeaseEvent],
    alarms: Sequence[Alarm],
) -> None:
    """What was decided, what became of the scenario's nodes, and what somebody should look at."""
    ids = {"run_id": str(flow_run.get_id() or ""), "scenario": scenario}
    if result.decision is not None:
        ids["decision_id"] = result.decision.decision_id
    applied = result.applied
    log.info(
        "%s (decision %s): %d launched, %d failed, %d held back, %d terminated; %d nodes, $%.2f/h",
        result.why, ids.get("decision_id", "as before"), applied.launched, applied.failed,
        applied.held_back, applied.terminated, result.nodes, result.cost_usd_per_hour, extra=ids,
    )  # fmt: skip
    mine = {lease.id for lease in lease_store(catalog).all() if lease.scenario == scenario}
    for event in (event for event in events if event.lease_id in mine):
        why = f": {event.reason}" if event.reason else ""
        extra = {**ids, "lease_id": event.lease_id}
        log.info("lease %s %s%s", event.lease_id, event.state, why, extra=extra)
    for alarm in alarms:
        log.warning("%s", alarm.what, extra=ids)

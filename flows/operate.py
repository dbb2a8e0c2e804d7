"""Keep the fleet at its best plan; run it every few minutes."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from flows.parameters import Home, Scenario
from tasks.alarms import raise_alarms_task
from tasks.artifacts import publish_round_task
from tasks.home import open_catalog
from tasks.opaque import opaque
from tasks.operating import Round, operate_task
from tasks.recording import coral_flow
from tasks.round_ends import close_task, look_task, remove_reports_task
from tasks.round_log import log_round
from tasks.scenario_file import read_scenario


@coral_flow("operate", timeout_seconds=1800)
def operate(
    scenario: Scenario = "core",
    home: Home = None,
    draft: bool = False,
    keep_reports_days: float = 30.0,
) -> Round:
    """Market, demand and what serving taught, allocate, apply to the scenario's fleet.

    Run again, it moves the fleet by the difference; with nothing changed it does nothing. A draft
    says what it would do.

    Args:
        draft: Plan and say what the fleet would be asked; do nothing.
        keep_reports_days: Reports of earlier plans are removed after so long; plans in force keep
            theirs.
    """
    catalog, now = open_catalog(home), datetime.now(UTC)
    spec = opaque(read_scenario(scenario))
    seen = look_task(catalog, spec, now, draft)
    result: Round = operate_task(catalog, spec, opaque(seen.inputs), now, draft)
    result = replace(result, demand=seen.demand, learned=seen.learned)
    events = close_task(catalog)
    if not draft:
        remove_reports_task(catalog, now - timedelta(days=keep_reports_days))
        alarms = raise_alarms_task(catalog, spec, opaque(seen.inputs), opaque(result))
        log_round(catalog, seen.inputs.scenario.name, result, events, alarms)
        publish_round_task(catalog, seen.inputs.scenario.name, opaque(result))
    return result

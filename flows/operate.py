"""Keep the fleet at its best plan; run it every few minutes."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from prefect import flow

from flows.parameters import Home, Scenario
from tasks.alarms import raise_alarms_task
from tasks.artifacts import publish_round_task
from tasks.corrections import learn
from tasks.home import open_catalog
from tasks.inputs import load_inputs
from tasks.lease_copy import copy_leases
from tasks.market.launches import remember_launches
from tasks.observed import load_inbox
from tasks.opaque import opaque
from tasks.operating import Round, operate_task
from tasks.round_log import log_round
from tasks.scenario_file import read_scenario


@flow(name="operate", validate_parameters=False, timeout_seconds=1800)
def operate(scenario: Scenario = "core", home: Home = None, draft: bool = False) -> Round:
    """Market, demand and what serving taught, allocate, apply to the scenario's fleet.

    Run again, it moves the fleet by the difference; with nothing changed it does nothing. A draft
    says what it would do.

    Args:
        draft: Plan and say what the fleet would be asked; do nothing.
    """
    catalog = open_catalog(home)
    spec, now = read_scenario(scenario), datetime.now(UTC)
    remember_launches(catalog)
    demand = load_inbox(catalog, now)
    inputs = load_inputs(catalog, spec, now)
    learned = learn(catalog, inputs, now, record=not draft)
    inputs = replace(inputs, corrections=learned.factors, notes=learned.notes)
    result = operate_task(catalog, opaque(spec), opaque(inputs), now, draft)
    result = replace(result, demand=demand, learned=learned)
    publish_round_task(catalog, inputs.scenario.name, opaque(result))
    alarms = raise_alarms_task(opaque(spec), opaque(inputs), opaque(result))
    log_round(spec.name, result, copy_leases(catalog), alarms)
    catalog.publish(force=True)
    return result

"""Choose what to run where, with the library in the catalog."""

from __future__ import annotations

from dataclasses import dataclass

from flows.parameters import Home, Scenario
from tasks.allocation import decide_task
from tasks.artifacts import publish_decision_task
from tasks.home import open_catalog
from tasks.inputs import Inputs, load_inputs
from tasks.opaque import opaque
from tasks.recording import coral_flow
from tasks.report import Decision
from tasks.scenario_file import read_scenario


@dataclass(frozen=True)
class AllocationResult:
    """A decision with what it was made from."""

    inputs: Inputs
    decision: Decision
    database: str


@coral_flow("allocate")
def allocate(scenario: Scenario = "core", home: Home = None) -> AllocationResult:
    """Plan with Coral and with Homo-joint, record both, publish the snapshot."""
    catalog = open_catalog(home)
    inputs = load_inputs(catalog, read_scenario(scenario))
    decision = decide_task(catalog, opaque(inputs))
    publish_decision_task(catalog, inputs.scenario.name, opaque(decision))
    catalog.publish(force=True)
    return AllocationResult(inputs, decision, str(catalog.database))

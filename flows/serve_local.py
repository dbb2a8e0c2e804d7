"""Serve a scenario with real vLLM on this machine, and measure it beside the plan."""

from __future__ import annotations

from dataclasses import dataclass

from flows.build_library import build_library
from flows.operate import operate
from flows.parameters import Home, Scenario
from tasks.home import open_catalog
from tasks.inputs import load_inputs
from tasks.local_run import Served, measure_service_task, prepare_task
from tasks.local_site import require_local
from tasks.opaque import opaque
from tasks.operating import Round
from tasks.recording import coral_flow
from tasks.scenario_file import read_scenario
from tasks.serving import serving, wait_routed_task

READY_S = 600.0  # a pipeline starts in 75 s on an idle machine, later where others work


@dataclass(frozen=True)
class LocalRun:
    """The round that started the fleet, and what requests saw of it."""

    round: Round
    replicas: int
    served: tuple[Served, ...]


@coral_flow("serve-local")
def serve_local(
    scenario: Scenario = "local",
    home: Home = None,
    requests: int = 64,
    concurrency: int | None = None,
    port: int | None = None,
) -> LocalRun:
    """Models and tables, library, controller and gateway, a round of `operate`, requests, end.

    Everything that was started is ended, also after a failure.

    Args:
        requests: To every workload's model.
        concurrency: Requests in flight; default: what the planned replicas take.
        port: Of the gateway; default: a free one.
    """
    catalog, spec = open_catalog(home), read_scenario(scenario)
    require_local(spec)
    prepare_task(catalog, opaque(spec))
    build_library(scenario, home, None, 0)
    inputs = load_inputs(catalog, spec)
    with serving(catalog.home, spec.name, port) as site:
        moved = operate(scenario, home)
        replicas = wait_routed_task(site, READY_S)
        served = measure_service_task(catalog, opaque(inputs), site.url, requests, concurrency)
    return LocalRun(moved, replicas, tuple(served))

"""Commands that go with a Prefect server: alerts, watch."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from coral.options import Json, Scenario, check_scenario
from coral.output import print_json
from coral.serving import Home

QUIET_S = 60.0  # after a loss was told of: the round that it begins takes a while


def add_scheduling(app: typer.Typer) -> None:
    """Register them."""
    app.command()(alerts)
    app.command()(watch)


def alerts(
    notify: Annotated[
        str | None,
        typer.Option(help='Webhook that gets a POST of {"text": ...}, as Slack takes it.'),
    ] = None,
    as_json: Json = False,
) -> None:
    """Have the Prefect server tell of failed runs, shortfall, stale prices, spend near the cap."""
    from tasks.alerts import set_alerts

    names = set_alerts(notify)
    if as_json:
        print_json({"alerts": names, "notified": notify is not None})
        return
    for name in names:
        typer.echo(name)
    if notify is None:
        typer.echo("Shown in the server's event feed; --notify URL tells somebody.")


def watch(
    scenario: Scenario = "core",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Tell the Prefect server at once of a node that is lost or about to be taken.

    The deployment `operate` then runs without waiting for its schedule. Goes on until interrupted.
    """
    from tasks.alerts import require_server
    from tasks.events import FLEET_LOSS, tell
    from tasks.home import open_catalog
    from tasks.scenario_file import read_scenario
    from tasks.watching import OVER, wait_for_cause

    require_server()
    check_scenario(scenario, home)
    catalog, spec = open_catalog(home), read_scenario(scenario)
    while True:
        cause = wait_for_cause(catalog, spec, 3600.0)
        if cause == OVER:
            continue
        tell(FLEET_LOSS, "scenario", spec.name, what=cause)
        if as_json:
            print_json({"event": FLEET_LOSS, "what": cause})
        else:
            typer.echo(f"told of: {cause}")
        time.sleep(QUIET_S)

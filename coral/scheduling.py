"""Commands beside the flows: alerts and watch for a Prefect server, and the dashboard."""

from __future__ import annotations

import ipaddress
import socket
import time
from pathlib import Path
from typing import Annotated

import typer

from coral.options import Json, check_scenario
from coral.output import print_json
from coral.serving import Home, refuse_taken
from planner.errors import InputError

QUIET_S = 60.0  # after a loss was told of: the round that it begins takes a while


def add_scheduling(app: typer.Typer) -> None:
    """Register them."""
    app.command()(alerts)
    app.command()(watch)
    app.command()(ui)


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
    scenario: Annotated[
        str,
        typer.Option(
            "--scenario",
            "-s",
            envvar="CORAL_SCENARIO",
            help="A scenario file, or a shipped one: that of the deployment `operate`.",
        ),
    ] = "core",
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
        asked = str(Path(scenario).resolve()) if Path(scenario).exists() else scenario
        tell(FLEET_LOSS, "scenario", spec.name, what=cause, scenario=asked)
        if as_json:
            print_json({"event": FLEET_LOSS, "what": cause})
        else:
            typer.echo(f"told of: {cause}")
        time.sleep(QUIET_S)


def ui(
    home: Home = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback needs --token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8050,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="CORAL_UI_TOKEN", help="Who opens the page must bring it: /?token=... once."
        ),
    ] = None,
) -> None:
    """Show fleet, costs, templates, plans and market in the browser: a read-only dashboard."""
    from tasks.home import open_catalog

    if not ipaddress.ip_address(_numeric(host)).is_loopback and not token:
        raise OpenDashboardError(
            f"--host {host} shows the dashboard to others: give it a --token (or CORAL_UI_TOKEN)"
        )
    try:
        from coral.ui.app import make_app, serve
    except ModuleNotFoundError as error:
        raise OpenDashboardError(
            f"the dashboard needs {error.name}; install it with pip install 'coral-serving[ui]'"
        ) from error
    refuse_taken(host, port)
    app = make_app(open_catalog(home), token)
    typer.echo(f"http://{host}:{port}/ (Ctrl-C ends it)", err=True)
    serve(app, host, port)


class OpenDashboardError(InputError):
    """The dashboard cannot be shown so."""


def _numeric(host: str) -> str:
    """An address of a host's name."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise OpenDashboardError(f"unknown --host {host}: {error.strerror or error}") from error

"""Commands that move nodes, and what they teach: operate, corrections, serve-local, down."""

from __future__ import annotations

import sys
import time
from typing import Annotated, NoReturn

import typer

from coral.options import Json, Scenario, check_scenario
from coral.output import answer, answer_rows, flow_run, print_json
from coral.serving import Home, refuse_taken

AGAIN_S = 30.0  # after a round for which a cloud did not answer


def add_operations(app: typer.Typer) -> None:
    """Register them."""
    app.command()(operate)
    app.command()(corrections)
    app.command("serve-local")(serve_local)
    app.command()(down)


def operate(
    scenario: Scenario = "core",
    home: Home = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan, and show every call; do nothing.")
    ] = False,
    approve: Annotated[
        bool,
        typer.Option(
            "--approve", help="Plan, show the difference, and ask before anything is done."
        ),
    ] = False,
    every: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Minutes between rounds, until stopped; a node that is lost or about to be taken "
            "begins one at once.",
        ),
    ] = None,
    keep_reports: Annotated[
        float,
        typer.Option(min=0.0, help="Days until reports of plans not in force any more go."),
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Plan from where the fleet stands and move it by the difference."""
    check_scenario(scenario, home)
    _check_cloud(scenario, home)
    if every is not None:
        _operate_every(scenario, home, every, keep_reports, as_json)
    draft = dry_run or approve
    with flow_run():
        from coral.render import print_round, round_summary
        from flows.operate import operate as run

        result = run(scenario, home, draft, keep_reports)
    if approve and result.calls and not as_json and sys.stdin.isatty():
        print_round(result)
        typer.confirm("Do this?", abort=True)
        with flow_run():
            result = run(scenario, home, keep_reports_days=keep_reports)
    answer(result, as_json, round_summary, print_round)
    if result.applied.refused:  # by what the scenario, or the account, says
        raise typer.Exit(2)
    if result.stopped or (result.applied.failed and not result.nodes):
        raise typer.Exit(1)


def _check_cloud(scenario: str, home: str | None) -> None:
    """Find missing credentials and the like before a flow starts."""
    from tasks.home import resolve_home
    from tasks.scenario_file import read_scenario

    spec = read_scenario(scenario)
    if spec.fleet.is_aws:
        from tasks.aws_site import check_aws

        check_aws(resolve_home(home), spec)


def _operate_every(
    scenario: str, home: str | None, minutes: float, keep_reports_days: float, as_json: bool
) -> NoReturn:
    """Rounds until interrupted; a cloud that does not answer now is asked again."""
    from coral.render import print_round, round_summary
    from executor.fleet import TransientError
    from tasks.home import open_catalog
    from tasks.scenario_file import read_scenario
    from tasks.watching import wait_for_cause

    while True:
        with flow_run():
            from flows.operate import operate as run

            try:
                result = run(scenario, home, keep_reports_days=keep_reports_days)
            except TransientError as error:
                typer.echo(f"no round now: {error}", err=True)
                time.sleep(AGAIN_S)
                continue
        answer(result, as_json, round_summary, print_round)
        catalog, spec = open_catalog(home), read_scenario(scenario)
        cause = wait_for_cause(catalog, spec, 60.0 * minutes)
        typer.echo(f"next round: {cause}", err=True)


def serve_local(
    scenario: Scenario = "local",
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="Requests to every workload's model.")
    ] = 64,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", min=1, help="Requests in flight. [what the planned replicas take]"
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Of the gateway. [a free one]")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Serve a local scenario with vLLM on this machine, measure it beside the plan, end it."""
    from tasks.home import resolve_home
    from tasks.local_site import check_engines, require_local
    from tasks.scenario_file import read_scenario

    spec = read_scenario(scenario)
    require_local(spec)
    check_engines(resolve_home(home), spec.fleet, to_be_made=True)
    if port is not None:
        refuse_taken("127.0.0.1", port)
    with flow_run():
        from coral.render_local import local_summary, print_local
        from flows.serve_local import serve_local as run

        result = run(scenario, home, requests, concurrency, port)
    answer(result, as_json, local_summary, print_local)
    if any(one.measured.failed for one in result.served):
        raise typer.Exit(1)


def corrections(
    evidence: Annotated[
        str | None,
        typer.Option(help="Id of a template, or its beginning: the minutes behind its correction."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 50,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """What serving taught: templates whose throughput is planned otherwise than profiled."""
    from tasks.correction_view import show_corrections

    columns, rows = show_corrections(home, evidence, limit)
    answer_rows(columns, rows, as_json)


def down(
    home: Home = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Terminate every node of the fleet."""
    from tasks.fleet_view import count_running, end_fleet

    running = count_running(home)
    if running and not yes and not typer.confirm(f"Terminate {running} nodes?"):
        raise typer.Exit(0)
    ended = end_fleet(home)
    if as_json:
        print_json({"terminated": ended})
        return
    typer.echo(f"{ended} nodes terminated.")

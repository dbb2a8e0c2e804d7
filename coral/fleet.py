"""`coral fleet`: the nodes that run the plan, one by one."""

from __future__ import annotations

from typing import Annotated

import typer

from coral.options import Json
from coral.output import answer_rows, print_json
from coral.serving import Home

fleet_app = typer.Typer(help="The nodes that run the plan.", no_args_is_help=True)
LeaseId = Annotated[str, typer.Argument(help="Id of a lease, or how it begins.")]


@fleet_app.command("list")
def fleet_list(
    everything: Annotated[bool, typer.Option("--all", help="Leases that are over too.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show the nodes of the fleet."""
    from tasks.fleet_view import list_fleet

    columns, rows = list_fleet(home, everything)
    answer_rows(columns, rows, as_json)


@fleet_app.command("show")
def fleet_show(lease: LeaseId, home: Home = None, as_json: Json = False) -> None:
    """Show one lease and all that happened to it."""
    from tasks.fleet_view import show_lease

    facts, columns, rows = show_lease(home, lease)
    if as_json:
        print_json({**facts, "events": [dict(zip(columns, row, strict=True)) for row in rows]})
        return
    for name, value in facts.items():
        if value not in {None, ""}:
            typer.echo(f"{name.replace('_', ' ')}: {value}")
    answer_rows(columns, rows, as_json)


@fleet_app.command("drain")
def fleet_drain(lease: LeaseId, home: Home = None, as_json: Json = False) -> None:
    """Let a node finish what it serves, then end it; the next round may launch another."""
    _end(lease, home, as_json, drain=True)


@fleet_app.command("terminate")
def fleet_terminate(lease: LeaseId, home: Home = None, as_json: Json = False) -> None:
    """End a node now; the next round may launch another."""
    _end(lease, home, as_json, drain=False)


@fleet_app.command("sweep")
def fleet_sweep(home: Home = None, as_json: Json = False) -> None:
    """Compare leases with what the clouds list, and end what no lease wants."""
    from tasks.fleet_view import sweep

    changed = sweep(home)
    if as_json:
        print_json({"changed": changed})
        return
    for line in changed:
        typer.echo(line)
    typer.echo(f"{len(changed)} changes." if changed else "Leases and clouds agree.")


@fleet_app.command("startups")
def fleet_startups(home: Home = None, as_json: Json = False) -> None:
    """Show how long nodes took to come up, part by part: medians by instance type."""
    from tasks.fleet_view import list_start_ups

    answer_rows(*list_start_ups(home), as_json)


@fleet_app.command("policy")
def fleet_policy() -> None:
    """Print the IAM policy that moving an aws fleet needs."""
    import json

    from tasks.aws_site import policy

    typer.echo(json.dumps(policy(), indent=2))


def _end(lease: str, home: str | None, as_json: bool, *, drain: bool) -> None:
    from tasks.fleet_view import end_one

    found = end_one(home, lease, drain=drain)
    if as_json:
        print_json({"lease": found.id, "state": found.state.value})
        return
    typer.echo(f"{found.id[:8]} ({found.instance_type} in {found.domain}) is {found.state}.")

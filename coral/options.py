"""Options that several commands share, and what they check first."""

from __future__ import annotations

from typing import Annotated

import typer

Scenario = Annotated[
    str,
    typer.Option(
        "--scenario",
        "-s",
        help="A scenario file, or a shipped one: core, ec2, extended, internet, local, "
        "small-nodes, suite, tiny.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")
]
Dask = Annotated[
    str | None,
    typer.Option(
        "--dask",
        help="Address of a running Dask scheduler, tcp://host:8786. [a cluster on this machine]",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=0,
        help="Dask workers here, started for long builds; 0: this process alone. [one per core]",
    ),
]
Yes = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask before a build of many combinations.")
]


def check_scenario(scenario: str, home: str | None) -> None:
    """Find a mistake in the input before a flow starts, which takes Prefect seconds."""
    from tasks.home import open_catalog
    from tasks.inputs import load_inputs
    from tasks.scenario_file import read_scenario

    load_inputs(open_catalog(home), read_scenario(scenario))

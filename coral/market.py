"""`coral market`: ask the clouds, show what is known, show how it moved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coral.options import Json
from coral.output import answer, flow_run
from coral.serving import Home

market_app = typer.Typer(
    help="The market: prices and stock of clouds, now and before.", no_args_is_help=True
)
Gpu = Annotated[str | None, typer.Option(help="Only this GPU type: L4.")]
Domain = Annotated[str | None, typer.Option(help="Only domains that match: 'aws:us-*'.")]
Type = Annotated[str | None, typer.Option("--type", help="Only instance types that match: 'g6*'.")]
Payment = Annotated[str | None, typer.Option("--market", help="spot or on_demand.")]
Source = Annotated[str | None, typer.Option("--source", help="Only prices of this source.")]
Scenario = Annotated[
    str,
    typer.Option(
        "--scenario", "-s", help="A scenario file, or a shipped one: its market, stock and limits."
    ),
]


@market_app.command("refresh")
def market_refresh(
    scenario: Scenario = "core",
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            help="snapshot, aws, a cloud in gpuhunt's catalogue (azure, gcp, lambdalabs, nebius, "
            "oci, runpod, ...), or a CSV or Parquet file. May be given several times. "
            "[those of the scenario]",
        ),
    ] = None,
    region: Annotated[
        list[str] | None,
        typer.Option("--region", help="AWS regions to ask: us-east-1. [all that are on]"),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Ask all sources at once and keep what changed; sources that fail keep their last prices."""
    from tasks.market.sources import with_sources
    from tasks.scenario_file import read_scenario

    with_sources(read_scenario(scenario).market, source, region)
    with flow_run():
        from coral.render_market import print_refresh, refresh_summary
        from flows.refresh_market import refresh_market as run

        result = run(scenario, home, source, region)
    answer(result, as_json, refresh_summary, print_refresh)
    if result.failed:
        raise typer.Exit(1)


@market_app.command("show")
def market_show(
    gpu: Gpu = None,
    domain: Domain = None,
    instance_type: Type = None,
    market: Payment = None,
    source: Source = None,
    rejected: Annotated[
        bool, typer.Option("--rejected", help="What sources said that may not be used, and why.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 30,
    scenario: Scenario = "core",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Prices in force, the cheapest GPU first, with how many nodes can be had and why."""
    from catalog.market.views import Filter
    from coral.render_market import print_shown, shown_summary
    from tasks.home import open_catalog
    from tasks.market.show import show_market
    from tasks.market.sources import feed_of
    from tasks.scenario_file import read_scenario

    spec = read_scenario(scenario)
    wanted = Filter(gpu, domain, instance_type, market, source and feed_of(source))
    found = show_market(
        open_catalog(home), wanted, spec.market, spec.stock, limit, rejected=rejected
    )
    answer(found, as_json, shown_summary, print_shown)


@market_app.command("history")
def market_history(
    gpu: Gpu = None,
    domain: Domain = None,
    instance_type: Type = None,
    market: Payment = None,
    source: Source = None,
    hours: Annotated[float, typer.Option(min=0.1, help="How far back.")] = 168.0,
    limit: Annotated[int, typer.Option(min=1, help="Changes to show.")] = 30,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the prices that moved most: FILE.svg.")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Price changes, the newest first, and the times in which a source was not seen."""
    from catalog.market.views import Filter
    from coral.render_market import history_summary, print_history
    from tasks.home import open_catalog
    from tasks.market.history import price_history
    from tasks.market.sources import feed_of

    wanted = Filter(gpu, domain, instance_type, market, source and feed_of(source))
    found = price_history(open_catalog(home), wanted, hours, limit, plot)
    answer(found, as_json, history_summary, print_history)

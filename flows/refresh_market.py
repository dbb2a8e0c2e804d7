"""Ask the clouds what they have and charge, and keep it; run it every ten minutes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from prefect import flow

from tasks.home import open_catalog
from tasks.market.launches import remember_launches
from tasks.market.refresh import Refreshed, publish_refresh_task, refresh_task
from tasks.market.sources import with_sources
from tasks.opaque import opaque
from tasks.scenario_file import read_scenario


@flow(name="refresh-market", validate_parameters=False)
def refresh_market(
    scenario: str = "core",
    home: str | None = None,
    sources: Sequence[str] | None = None,
    regions: Sequence[str] | None = None,
) -> Refreshed:
    """All sources of the scenario's market side by side; what fails keeps its last good prices.

    `sources` and `regions` (of AWS) stand in for what the scenario says.
    """
    catalog = open_catalog(home)
    market = with_sources(read_scenario(scenario).market, sources, regions)
    remember_launches(catalog)
    found = refresh_task(catalog, opaque(market), datetime.now(UTC))
    publish_refresh_task(opaque(found))
    catalog.publish(force=True)
    return found

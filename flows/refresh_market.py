"""Ask the clouds what they have and charge, and keep it; run it every ten minutes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from flows.parameters import Home, Scenario
from tasks.home import open_catalog
from tasks.market.launches import remember_launches
from tasks.market.refresh import Refreshed, publish_refresh_task, refresh_task
from tasks.market.sources import with_sources
from tasks.opaque import opaque
from tasks.recording import coral_flow
from tasks.scenario_file import read_scenario


@coral_flow("refresh-market", timeout_seconds=600)
def refresh_market(
    scenario: Scenario = "core",
    home: Home = None,
    sources: Sequence[str] | None = None,
    regions: Sequence[str] | None = None,
) -> Refreshed:
    """All sources of the scenario's market side by side; what fails keeps its last good prices.

    Args:
        sources: Instead of the scenario's.
        regions: Of AWS, instead of the scenario's.
    """
    catalog = open_catalog(home)
    market = with_sources(read_scenario(scenario).market, sources, regions)
    remember_launches(catalog)
    found = refresh_task(catalog, opaque(market), datetime.now(UTC))
    publish_refresh_task(opaque(found))
    catalog.publish(force=True)
    return found

"""Rounds of `operate` on the smallest scenario, with a simulated fleet."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from catalog.store import Catalog
from planner.leases import held_nodes
from planner.scenario import ScenarioSpec
from tasks.inputs import load_inputs
from tasks.operating import Round, lease_store, operate_once
from tasks.scenario_file import read_scenario

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


NAME = "tiny"  # of the scenario


def spec(**changes) -> ScenarioSpec:
    """tiny with some of everything to rent."""
    base = read_scenario("tiny")
    stock = base.stock.model_copy(update={"factor": 1.0})
    return base.model_copy(update={"stock": stock, **changes})


def run(catalog: Catalog, scenario: ScenarioSpec | None = None, minutes: int = 0) -> Round:
    chosen = scenario or spec()
    now = NOW + timedelta(minutes=minutes)
    return operate_once(catalog, chosen, load_inputs(catalog, chosen), now)


def fleet(catalog: Catalog) -> dict:
    return dict(held_nodes(lease_store(catalog).all()))


def reprice(catalog: Catalog, factor_by_type: dict[str, float], minutes: int = 1) -> None:
    """A newer pull of the whole market, with some prices multiplied."""
    cases = " ".join(f"WHEN '{name}' THEN {factor}" for name, factor in factor_by_type.items())
    with catalog.write() as connection:
        connection.execute(
            "INSERT INTO offer BY NAME SELECT * REPLACE (observed_at + to_minutes(?) AS "
            f"observed_at, price_usd_per_hour * CASE instance_type {cases} ELSE 1 END AS "
            "price_usd_per_hour) FROM offer "
            "WHERE observed_at = (SELECT max(observed_at) FROM offer)",
            [minutes],
        )

"""Why the latest plan is as it is, and what would change it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from catalog.store import Catalog
from planner.allocation.explain import (
    EntryPrice,
    cost_by_workload,
    entry_prices,
    without_gpu,
)
from planner.allocation.plan import Plan
from planner.allocation.solve import plan_allocation
from planner.errors import InputError
from tasks.allocation import allocation_input, latest_plan, read_library
from tasks.home import open_catalog
from tasks.inputs import load_inputs
from tasks.scenario_file import read_scenario


class NoPlanError(InputError):
    """Nothing was planned yet for a scenario."""


@dataclass(frozen=True)
class Explanation:
    """The latest plan as recorded, and what today's market and library say about it.

    `plan` is None where today's market no longer allows it; then nothing after it is known.
    """

    recorded: Mapping[str, Any]  # the plan's row, services, binding, cost_by_class, class_worth
    plan: Plan | None
    cost_by_workload: Mapping[str, float]  # USD/hour
    entry_prices: tuple[EntryPrice, ...]  # of every GPU type that the plan does not use
    without: Plan | None  # the best plan without the GPU asked about


def explain_latest(home: str | None, scenario: str, without: str | None = None) -> Explanation:
    """Explain Coral's latest plan of a scenario; `without` names a GPU to plan without.

    Raises NoPlanError: nothing was planned yet. UnknownNameError: nobody offers that GPU.
    """
    catalog, spec = open_catalog(home), read_scenario(scenario)
    recorded = _recorded(catalog, spec.name)
    inputs = load_inputs(catalog, spec)
    data = allocation_input(inputs, read_library(catalog, inputs))
    plan = latest_plan(catalog, data, spec.name)
    best = plan_allocation(without_gpu(data, without)) if without else None
    return Explanation(
        recorded,
        plan,
        cost_by_workload(plan) if plan else {},
        entry_prices(data, plan) if plan else (),
        best,
    )


def _recorded(catalog: Catalog, scenario: str) -> Mapping[str, Any]:
    columns, rows = catalog.query(
        "SELECT allocation_id, created_at, scenario, cost_usd_per_hour, served_share, gap, proven "
        "FROM allocation WHERE scenario = ? AND planner = 'coral' "
        "ORDER BY rowid DESC LIMIT 1",
        [scenario],
    )
    if not rows:
        raise NoPlanError(
            f"nothing was planned yet for scenario {scenario!r}; run `coral allocate`"
        )
    found: dict[str, Any] = dict(zip(columns, rows[0], strict=True))
    for key, query in (
        (
            "services",
            "SELECT workload, demand_rps, served_rps FROM allocation_service "
            "WHERE allocation_id = ? ORDER BY workload",
        ),
        (
            "binding",
            "SELECT kind, text, used, amount, unit, worth, worth_unit FROM allocation_binding "
            "WHERE allocation_id = ? ORDER BY worth DESC, text",
        ),
        (
            "cost_by_class",
            "SELECT node_class, market, sum(nodes)::INTEGER AS nodes, "
            "sum(nodes * price_usd_per_hour) AS usd_per_hour FROM allocation_nodes "
            "WHERE allocation_id = ? GROUP BY ALL ORDER BY usd_per_hour DESC",
        ),
        (
            "class_worth",
            "SELECT node_class, domain, worth, worth_unit FROM allocation_class_worth "
            "WHERE allocation_id = ? ORDER BY worth DESC, node_class",
        ),
    ):
        names, values = catalog.query(query, [found["allocation_id"]])
        found[key] = [dict(zip(names, row, strict=True)) for row in values]
    return found

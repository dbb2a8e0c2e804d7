"""What a scenario may rent: prices by zone, what is known of availability, and quotas as limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from planner.allocation.options import Quota
from planner.availability import Evidence, describe_avoided, estimate_nodes
from planner.errors import MarketError
from planner.known import Known, MarketRow
from planner.scenario import STOCK_LEVELS, ScenarioSpec, StockSpec
from planner.types import Market, Offer

OfferKey = tuple[str, str, Market]  # domain, instance type, market


def offers_to_rent(spec: ScenarioSpec, known: Known, evidence: Evidence) -> tuple[Offer, ...]:
    """The cheapest zone's price of every (domain, instance type, market) with stock.

    Zones where launches failed lately are passed over.
    """
    kinds = {(kind.cloud, kind.name): kind for kind in known.instance_types}
    offers = []
    for (domain, instance_type, market), rows in sorted(_rows(spec, known).items()):
        places = [(domain, row.zone, instance_type, market) for row in rows]
        usable = [row for row, at in zip(rows, places, strict=True) if not evidence.avoids(at)]
        if not usable:
            continue
        row = min(usable, key=lambda row: row.price_usd_per_hour)
        kind = kinds[domain.split(":")[0], instance_type]
        found = estimate_nodes(
            domain,
            instance_type,
            market,
            kind.vcpus,
            *assumed_stock(
                spec.stock,
                spec.stock_note,
                known.stock,
                (domain, instance_type),
                kind.node.gpu_count,
            ),
            evidence,
            row.nodes,
        )
        if found.nodes > 0:
            offers.append(
                Offer(
                    domain=domain,
                    instance_type=instance_type,
                    node_class=row.node_class,
                    market=market,
                    price_usd_per_hour=row.price_usd_per_hour,
                    stock=found.nodes,
                    stock_source=found.why,
                    zone=row.zone,
                    gpus=kind.node.gpu_count,
                    vcpus=kind.vcpus,
                )
            )
    return tuple(offers)


def zones_by_price(spec: ScenarioSpec, known: Known) -> dict[OfferKey, tuple[str, ...]]:
    """Zones of every offer, the cheapest first; those where launches failed lately last."""
    found = {}
    for key, rows in _rows(spec, known).items():

        def rank(row: MarketRow, at: OfferKey = key) -> tuple[bool, float, str]:
            avoided = known.evidence.avoids((at[0], row.zone, at[1], at[2]))
            return avoided, row.price_usd_per_hour, row.zone or ""

        zones = [row.zone for row in sorted(rows, key=rank) if row.zone is not None]
        if zones:
            found[key] = tuple(dict.fromkeys(zones))
    return found


def _rows(spec: ScenarioSpec, known: Known) -> dict[OfferKey, list[MarketRow]]:
    """Prices that the scenario may use, of all zones."""
    rows: dict[OfferKey, list[MarketRow]] = {}
    for row in known.prices:
        if not (math.isfinite(row.price_usd_per_hour) and row.price_usd_per_hour > 0):
            raise MarketError(
                f"{row.domain} {row.instance_type} {row.market}: price must be positive, "
                f"got {row.price_usd_per_hour}; correct or remove that offer"
            )
        if (
            row.domain in spec.domains
            and row.market in spec.markets
            and row.node_class in spec.node_classes
        ):
            rows.setdefault((row.domain, row.instance_type, row.market), []).append(row)
    return rows


def assumed_stock(
    stock: StockSpec,
    note: str,
    known: Mapping[tuple[str, str, str], int],
    place: tuple[str, str],
    gpus: int,
) -> tuple[int, str]:
    """Nodes that are assumed of a (domain, instance type), and how to say so.

    `known` has assumed nodes by (level, domain, instance type); `gpus` is of one node.
    """
    known_at_a_level = any((level, *place) in known for level in STOCK_LEVELS)
    if known_at_a_level or not stock.unknown_gpus:
        return math.floor(known.get((stock.level, *place), 0) * stock.factor), note
    nodes = math.floor(max(1, stock.unknown_gpus // gpus) * stock.factor)
    return nodes, f"stock unknown: assumed {nodes} nodes"


def live_quotas(evidence: Evidence, offers: Sequence[Offer]) -> list[Quota]:
    """What the clouds allow together, as limits of the plan."""
    found = [
        Quota(state.left_vcpus, state.domain, state.instance_types, state.market)
        for state in evidence.quotas
    ]
    return [quota for quota in found if any(quota.covers(offer) for offer in offers)]


def avoided_places_of(spec: ScenarioSpec, known: Known) -> str:
    """Places of the scenario where launches failed lately, in words."""
    kinds = {kind.name for kind in known.instance_types if kind.node.name in spec.node_classes}
    return describe_avoided(
        [
            item
            for place, item in sorted(known.evidence.avoided.items(), key=lambda at: str(at[0]))
            if place[0] in spec.domains and place[2] in kinds and place[3] in spec.markets
        ]
    )


def unpriced_classes(spec: ScenarioSpec, known: Known) -> tuple[str, ...]:
    """Classes that a cloud rents in another of the scenario's domains, but has no price of here."""
    priced = {
        (row.domain, row.node_class)
        for row in known.prices
        if row.market in spec.markets and row.domain in spec.domains
    }
    clouds = {(domain.split(":")[0], name) for domain, name in priced}
    return tuple(
        f"{name} in {domain}"
        for domain in spec.domains
        for name in spec.node_classes
        if (domain.split(":")[0], name) in clouds and (domain, name) not in priced
    )

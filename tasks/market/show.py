"""The market as the command line shows it: every offer with price, age and what can be had."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import duckdb

from catalog import reads
from catalog.market.reads import FeedState, hold_prices, read_feeds
from catalog.market.views import Filter, read_failures, read_now, read_rejections
from catalog.seed import import_seed
from catalog.store import Catalog
from planner.availability import Evidence, describe_avoided, estimate_nodes
from planner.errors import UnknownNameError
from planner.market import MarketSpec
from planner.offers import assumed_stock
from planner.scenario import StockSpec
from planner.types import Market
from tasks.market.sources import feed_of
from tasks.market.state import age_text, read_evidence

COLUMNS = ["domain", "zone", "instance type", "node class", "market", "$/h", "$/GPU/h", "since",
           "seen", "source", "nodes", "because"]  # fmt: skip
REJECTED = ["domain", "zone", "instance type", "market", "$/h", "seen", "source", "why"]


@dataclass(frozen=True)
class Shown:
    """Rows to print, and the state of every source."""

    columns: list[str]
    rows: list[tuple[object, ...]]
    found: int  # rows that match, more than are shown
    sources: list[FeedState]
    failures: list[str]  # parts that did not answer the last time
    avoided: str
    stale: list[str]  # sources


def show_market(
    catalog: Catalog,
    wanted: Filter,
    market: MarketSpec,
    stock: StockSpec,
    limit: int,
    rejected: bool = False,
) -> Shown:
    """Prices in force (or what was refused), from the snapshot, with an estimate of stock each."""
    if not catalog.snapshot.exists():
        with catalog.write() as connection:
            import_seed(connection)
        catalog.publish(force=True)
    now = datetime.now(UTC)
    with catalog.read_snapshot() as connection:
        _check_names(connection, wanted)
        feeds = sorted(
            name for (name,) in connection.execute("SELECT DISTINCT feed FROM offer").fetchall()
        )
        evidence = read_evidence(connection, feeds, market, now)
        prices = hold_prices(connection)
        states = read_feeds(connection, feeds, prices)
        if rejected:
            columns, rows = REJECTED, _refused(connection, wanted, now)
        else:
            columns, rows = COLUMNS, _offers(connection, wanted, stock, evidence, now, prices)
        failures = _failures(connection)
    return Shown(
        columns=columns,
        rows=rows[:limit],
        found=len(rows),
        sources=states,
        failures=failures,
        avoided=describe_avoided(list(evidence.avoided.values())),
        stale=[state.feed for state in states if _is_stale(state, market, now)],
    )


def _offers(
    connection: duckdb.DuckDBPyConnection,
    wanted: Filter,
    stock: StockSpec,
    evidence: Evidence,
    now: datetime,
    prices: str,
) -> list[tuple[object, ...]]:
    known = reads.read_stock(connection)
    rows: list[tuple[object, ...]] = []
    for one in read_now(connection, wanted, prices):
        nodes, why = _had(one, stock, known, evidence)
        rows.append(
            (
                one["domain"],
                one["zone"],
                one["instance_type"],
                one["node_class"],
                one["market"],
                one["price_usd_per_hour"],
                one["usd_per_gpu_hour"],
                age_text(now - one["since"]),
                age_text(now - one["seen_at"]),
                one["feed"],
                nodes,
                why,
            )
        )
    return rows


def _had(
    one: dict[str, Any],
    stock: StockSpec,
    known: dict[tuple[str, str, str], int],
    evidence: Evidence,
) -> tuple[int, str]:
    """Nodes that can be had of one offer, and why."""
    domain, kind, market = one["domain"], one["instance_type"], Market(one["market"])
    place = (domain, one["zone"], kind, market)
    if evidence.avoids(place):
        item = evidence.avoided.get(place) or evidence.avoided[domain, None, kind, market]
        return 0, describe_avoided([item])
    assumed = assumed_stock(stock, stock.note, known, (domain, kind), one["gpu_count"])
    found = estimate_nodes(domain, kind, market, one["vcpus"], *assumed, evidence, one["nodes"])
    if found.nodes == 0 and found.why == stock.note:
        return 0, "unknown: no stock is assumed of it"
    return found.nodes, found.why


def _refused(
    connection: duckdb.DuckDBPyConnection, wanted: Filter, now: datetime
) -> list[tuple[object, ...]]:
    return [
        (
            one["domain"],
            one["zone"],
            one["instance_type"],
            one["market"],
            one["price_usd_per_hour"],
            age_text(now - one["observed_at"]),
            one["feed"],
            one["why"],
        )
        for one in read_rejections(connection, wanted)
    ]


def _failures(connection: duckdb.DuckDBPyConnection) -> list[str]:
    return ["{feed} {domain} {part}: {detail}".format_map(one) for one in read_failures(connection)]


def _check_names(connection: duckdb.DuckDBPyConnection, wanted: Filter) -> None:
    for kind, name, query in (
        ("GPU", wanted.gpu, "SELECT gpu FROM gpu"),
        ("source", wanted.feed and feed_of(wanted.feed), "SELECT DISTINCT feed FROM offer"),
        ("market", wanted.market, "SELECT DISTINCT market FROM offer"),
    ):
        if name is not None:
            known = [row[0] for row in connection.execute(query).fetchall()]
            if name not in known:
                raise UnknownNameError(kind, name, known)


def _is_stale(state: FeedState, market: MarketSpec, now: datetime) -> bool:
    limit = market.stale_after(state.feed)
    return (
        limit is not None
        and state.seen_at is not None
        and now - state.seen_at > timedelta(minutes=limit)
    )

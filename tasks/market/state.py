"""The market as a plan reads it: prices of the chosen sources, their age, evidence of stock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import duckdb

from catalog.market.reads import (
    FeedState,
    hold_prices,
    read_feeds,
    read_launches,
    read_market,
    read_quotas,
    read_scores,
)
from planner.availability import Evidence, avoided_places
from planner.errors import MarketError
from planner.known import MarketRow
from planner.market import AWS, SNAPSHOT, MarketSpec
from tasks.market.sources import feed_of

MEMORY = timedelta(hours=24)  # of failed launches: several times the longest time to avoid a place


@dataclass(frozen=True, slots=True)
class FeedInUse:
    """One source of a plan's prices."""

    source: str
    used: int  # prices that the plan may use
    oldest_at: datetime | None  # when the oldest of them was last seen
    age: timedelta | None
    stale: bool
    rejected: dict[str, int]  # offers by why they are not used

    @property
    def note(self) -> str:
        """What is said of it where all is not well; '' where it is."""
        if self.oldest_at is None:
            return f"{self.source} has not answered yet (`coral market refresh`)"
        if self.stale:
            return f"prices of {self.source} are stale: {age_text(self.age)} old"
        return ""


@dataclass(frozen=True)
class MarketState:
    """All that a plan knows of the market."""

    prices: tuple[MarketRow, ...]
    evidence: Evidence
    feeds: tuple[FeedInUse, ...]

    @property
    def judged(self) -> dict[str, int]:
        """Prices refused by reason, of the sources in use; key '' counts those in use."""
        counts = Counter({"": sum(feed.used for feed in self.feeds)})
        for feed in self.feeds:
            if feed.used:
                counts.update(feed.rejected)
        return dict(counts)

    @property
    def prices_at(self) -> datetime:
        """When the oldest prices that are used were last seen."""
        used = [feed.oldest_at for feed in self.feeds if feed.used and feed.oldest_at is not None]
        seen = [feed.oldest_at for feed in self.feeds if feed.oldest_at is not None]
        return min(used or seen)


def read_state(
    connection: duckdb.DuckDBPyConnection,
    market: MarketSpec,
    now: datetime,
    domains: Collection[str] | None = None,
) -> MarketState:
    """The prices of a market's sources, and what is known of stock beyond assumptions.

    `domains` are those whose prices count for a source's age; all of them by default.
    Raises MarketError: no source has a price.
    """
    feeds = {feed_of(source): source for source in market.sources}
    prices = hold_prices(connection)
    rows = read_market(connection, list(feeds), prices)
    if not rows:
        raise MarketError(
            f"no prices yet of {', '.join(market.sources)}: run `coral market refresh` with these "
            f"sources, or add {SNAPSHOT!r} to market.sources"
        )
    states = {state.feed: state for state in read_feeds(connection, list(feeds), prices)}
    in_use = []
    for feed, source in feeds.items():
        seen = [
            seen_at
            for name, seen_at, row in rows
            if name == feed and (domains is None or row.domain in domains)
        ]
        in_use.append(
            _in_use(source, len(seen), min(seen, default=None), states[feed], market, now)
        )
    evidence = read_evidence(connection, [feed for feed in feeds if feed != SNAPSHOT], market, now)
    return MarketState(tuple(row for _, _, row in rows), evidence, tuple(in_use))


def read_evidence(
    connection: duckdb.DuckDBPyConnection, feeds: Sequence[str], market: MarketSpec, now: datetime
) -> Evidence:
    """What is known of stock: launches of the last day, and what live sources say."""
    fresh = timedelta(minutes=market.stale_after(AWS) or 0.0)
    launches = read_launches(connection, now - MEMORY) if market.avoid_minutes else []
    return Evidence(
        avoided=avoided_places(launches, now, market.avoid_minutes),
        scores=read_scores(connection, feeds, now, fresh) if feeds else {},
        quotas=read_quotas(connection, feeds) if feeds else (),
    )


def _in_use(
    source: str,
    used: int,
    oldest: datetime | None,
    state: FeedState,
    market: MarketSpec,
    now: datetime,
) -> FeedInUse:
    age = None if oldest is None else now - oldest
    limit = market.stale_after(source)
    stale = age is not None and limit is not None and age > timedelta(minutes=limit)
    return FeedInUse(source, used, oldest or state.seen_at, age, stale, state.rejected)


def age_text(age: timedelta | None) -> str:
    """'7 min', '3 h', '12 days'."""
    if age is None:
        return "never seen"
    minutes = age.total_seconds() / 60.0
    if minutes < 90:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h" if minutes < 48 * 60 else f"{minutes / 1440:.0f} days"

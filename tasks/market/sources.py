"""The sources of a market by name, each one call that answers with a pull."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import duckdb

from catalog import reads
from catalog.market.pull import Of, Pull
from catalog.market.reads import read_asked
from planner.errors import InputError
from planner.market import AWS, SNAPSHOT, MarketSpec, is_file
from planner.types import InstanceType
from tasks.scenario_file import first_problem


class MarketSpecError(InputError):
    """Sources on the command line that cannot be."""


@dataclass(frozen=True)
class Before:
    """What the catalog knows of a source before it is asked."""

    types: Sequence[InstanceType]
    seen: Mapping[Of, Mapping[str, datetime]] = field(default_factory=dict)  # last, by domain


def feed_of(source: str) -> str:
    """Under which name the catalog keeps a source: a file's is its path in full."""
    return str(Path(source).expanduser().resolve()) if is_file(source) else source


def feeds_of(market: MarketSpec) -> list[str]:
    """All sources as the catalog names them."""
    return [feed_of(source) for source in market.sources]


def with_sources(
    market: MarketSpec, sources: Sequence[str] | None, regions: Sequence[str] | None = None
) -> MarketSpec:
    """A market with other sources or AWS regions.

    Raises MarketSpecError: a source that nobody knows.
    """
    from pydantic import ValidationError

    values = market.model_dump()
    if sources:
        kept = {k: v for k, v in market.stale_after_minutes.items() if k in sources}
        values |= {"sources": tuple(sources), "stale_after_minutes": kept}
    if regions:
        values["aws_regions"] = tuple(regions)
    try:
        return MarketSpec.model_validate(values)
    except ValidationError as error:
        raise MarketSpecError(first_problem(error)) from error


def read_before(connection: duckdb.DuckDBPyConnection, source: str) -> Before:
    """What a pull of a source goes by."""
    feed = feed_of(source)
    seen = {of: read_asked(connection, feed, of.value) for of in (Of.SPOT, Of.ON_DEMAND)}
    return Before(reads.read_instance_types(connection), seen)


def caller(
    source: str, market: MarketSpec, before: Before, at: datetime
) -> Callable[[], Pull] | None:
    """The call that asks a source; None for the shipped prices, which are there."""
    if source == SNAPSHOT:
        return None
    if source == AWS:
        from tasks.market.aws.source import AwsSource

        kinds = [kind for kind in before.types if kind.cloud == AWS]
        since = before.seen.get(Of.SPOT, {})
        aws = AwsSource(kinds, since, market.aws_regions, market.deadline_s)
        return lambda: aws.pull(at)
    if is_file(source):
        from tasks.market.files import pull_file

        domains = {domain for seen in before.seen.values() for domain in seen}
        return lambda: pull_file(Path(feed_of(source)), at, domains)
    from tasks.market.hunt import pull_provider

    folder = Path(market.gpuhunt_folder).expanduser() if market.gpuhunt_folder else None
    return lambda: pull_provider(source, at, folder)

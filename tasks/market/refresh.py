"""Ask all sources of a market side by side and take in what each answers as it comes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from prefect.artifacts import create_table_artifact

from catalog.market.pull import Landed, Limits, Pull
from catalog.market.writes import append_pull, watch_failure
from catalog.seed import import_seed
from catalog.store import Catalog
from planner.errors import CoralError, InputError
from planner.market import SNAPSHOT, MarketSpec
from tasks.coral_task import coral_task, publishing_task
from tasks.market.deadline import DeadlineError, run_all
from tasks.market.sources import caller, feed_of, read_before
from tasks.progress import report

SLACK_S = 5.0  # a source keeps its own deadline; this is for one that does not


@dataclass(frozen=True)
class Refreshed:
    """What became of a refresh."""

    at: datetime
    landed: tuple[Landed, ...]
    failed: Mapping[str, CoralError]  # by source
    seconds: float

    @property
    def partly(self) -> list[tuple[str, str, str, str]]:
        """(source, domain, part, why) of what was not answered by sources that were."""
        return [
            (found.feed, part.domain, part.of.value, part.failed)
            for found in self.landed
            for part in found.parts
            if part.failed
        ]


def refresh(catalog: Catalog, market: MarketSpec, at: datetime) -> Refreshed:
    """Ask every source, each until its deadline; what fails leaves the last good prices.

    Raises the first source's error where none answered: an InputError if there is one.
    """
    started = time.perf_counter()
    with catalog.write() as connection:
        import_seed(connection)
    with catalog.read() as connection:
        calls = {
            source: call
            for source in market.sources
            if (call := caller(source, market, read_before(connection, source), at)) is not None
        }
    landed: list[Landed] = []
    failed: dict[str, CoralError] = {}

    def take(source: str, found: Pull | Exception) -> None:
        report("Sources", len(landed) + len(failed) + 1, len(calls))
        if isinstance(found, Pull):
            with catalog.write() as connection:
                landed.append(append_pull(connection, found, Limits(market.largest_jump)))
            return
        failed[source] = _named(source, found)
        with catalog.write() as connection:
            watch_failure(connection, feed_of(source), str(failed[source]), at)

    until = time.monotonic() + market.deadline_s + SLACK_S
    answers = run_all(calls, max(1, len(calls)), until, take)
    for source, found in answers.items():
        if isinstance(found, DeadlineError) and source not in failed:
            take(source, DeadlineError(f"{source}: no answer within {market.deadline_s:g} s"))
    if failed and not landed and SNAPSHOT not in market.sources:
        raise min(failed.values(), key=lambda error: not isinstance(error, InputError))
    return Refreshed(at, tuple(landed), failed, time.perf_counter() - started)


refresh_task = coral_task("refresh-market", refresh)


def _named(source: str, error: Exception) -> CoralError:
    if isinstance(error, CoralError):
        return error
    said = " ".join(str(error).split())[:200]
    return CoralError(f"{source}: {type(error).__name__}: {said}")


def publish_refresh(found: Refreshed) -> None:
    """A table of the refresh among Prefect's artifacts."""
    rows: list[dict[str, object]] = [
        {
            "source": one.feed,
            "prices": one.prices,
            "changed": one.changed,
            "withdrawn": one.withdrawn,
            "rejected": sum(one.rejected.values()),
            "not answered": sum(bool(part.failed) for part in one.parts),
        }
        for one in found.landed
    ]
    rows += [{"source": source, "failed": str(error)} for source, error in found.failed.items()]
    create_table_artifact(rows, key="coral-market", description="Sources of the last refresh")


publish_refresh_task = publishing_task("publish-market", publish_refresh)

"""AWS as a source of prices and evidence: all its regions side by side, until a deadline."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import polars as pl

from catalog.market.pull import PRICED, PRICES, Fact, Of, Part, Pull, QuotaRow
from executor.aws.clients import AwsClients
from executor.aws.errors import RegionOffError
from planner.errors import CoralError
from planner.market import AWS
from planner.types import InstanceType
from tasks.market.aws import answers, requests
from tasks.market.aws.calls import AwsCalls
from tasks.market.deadline import DeadlineError, run_all
from tasks.progress import report

WORKERS = 12  # calls at a time over all regions
FIRST_HISTORY = timedelta(hours=24)  # of spot prices, where none were pulled before
OVERLAP = timedelta(minutes=10)  # with the pull before: prices may appear late, clocks differ

ASKED = (Of.SPOT, Of.OFFERINGS, Of.QUOTAS, Of.FACTS)  # of every region

Found = dict[tuple[str, Of], Any]  # answer or error by (region, part)


@dataclass(frozen=True)
class AwsSource:
    """What to ask of AWS."""

    types: Sequence[InstanceType]  # of AWS, that map to node classes
    since: Mapping[str, datetime] = field(default_factory=dict)  # last seen, by domain
    regions: Sequence[str] | None = None  # all that are on
    deadline_s: float = 60.0

    def pull(self, at: datetime) -> Pull:
        """Ask everything.

        A region or part that fails leaves the others; what concerns the whole account
        (credentials, no region at all) is raised as one of executor.aws.errors.
        """
        until = time.monotonic() + self.deadline_s
        calls = AwsCalls(AwsClients(), {kind.name: kind.vcpus for kind in self.types})
        enabled = _one(calls.regions, until)
        wanted = [name for name in enabled if self.regions is None or name in self.regions]
        off = sorted(set(self.regions or ()) - set(enabled))
        if not wanted:
            raise RegionOffError(
                f"none of the AWS regions {', '.join(off) or 'named'} is switched on for this "
                f"account; it has {', '.join(enabled) or 'none'}: see market.aws_regions"
            )
        found: Found = {}
        jobs = self._jobs(calls, wanted, at, found)
        count = itertools.count(1)
        ended = run_all(
            jobs, WORKERS, until, lambda *_: report("Asking AWS", next(count), len(jobs))
        )
        return self._gather(at, wanted, off, found, ended)

    def _jobs(
        self, calls: AwsCalls, regions: Sequence[str], at: datetime, found: Found
    ) -> dict[tuple[str, ...], Callable[[], Any]]:
        """Prices of each type, scores of each group, and each region with its parts in order.

        A region's parts go to `found` as they come: what it answered before it hung counts.
        """
        jobs: dict[tuple[str, ...], Callable[[], Any]] = {}
        for name in calls.types:
            jobs["price", name] = partial(calls.on_demand, name)
        for region in regions:
            jobs["region", region] = partial(self._region, calls, region, at, found)
        for asked, concerns in requests.score_groups(self.types):
            for batch in requests.batches(regions, requests.SCORE_REGIONS):
                jobs["score", *concerns, batch[0]] = partial(calls.scores, asked, concerns, batch)
        return jobs

    def _region(self, calls: AwsCalls, region: str, at: datetime, found: Found) -> None:
        last = self.since.get(answers.domain_of(region))
        since = last - OVERLAP if last is not None else at - FIRST_HISTORY
        for part, ask in (
            (Of.SPOT, lambda: calls.spot(region, since)),
            (Of.OFFERINGS, lambda: calls.offerings(region)),
            (Of.QUOTAS, lambda: calls.quotas(region)),
            (Of.FACTS, lambda: calls.facts(region)),
        ):
            try:
                found[region, part] = ask()
            except CoralError as error:
                found[region, part] = error

    def _gather(
        self,
        at: datetime,
        regions: Sequence[str],
        off: Sequence[str],
        found: Found,
        ended: Mapping[tuple[str, ...], Any],
    ) -> Pull:
        """One pull out of all answers."""
        late = DeadlineError(f"no answer within {self.deadline_s:g} s")
        on_demand, no_prices = _by_region(ended)
        scores, no_scores = _scores(ended)
        rows: list[answers.Price] = []
        parts: list[Part] = []
        quotas: list[QuotaRow] = []
        offerings: list[tuple[str, str, str]] = []
        facts: dict[str, Fact] = {}
        for region in off:
            said = f"region {region} is not switched on for this account"
            parts += [Part(answers.domain_of(region), of, said) for of in PRICED]
        for region in regions:
            domain = answers.domain_of(region)
            got = {of: found.get((region, of), late) for of in ASKED}
            missing = {of: str(value) for of, value in got.items() if isinstance(value, Exception)}
            missing[Of.ON_DEMAND] = no_prices or missing.get(Of.OFFERINGS, "")
            missing[Of.SCORES] = no_scores
            parts += [Part(domain, of, missing.get(of, "")) for of in Of]
            if Of.SPOT not in missing:
                rows += got[Of.SPOT]
            if Of.OFFERINGS not in missing:
                offerings += [(domain, zone, kind) for zone, kind in got[Of.OFFERINGS]]
            if not missing[Of.ON_DEMAND]:
                prices = on_demand.get(region, {})
                rows += answers.on_demand_rows(region, prices, got[Of.OFFERINGS])
            if Of.QUOTAS not in missing:
                quotas += got[Of.QUOTAS]
            if Of.FACTS not in missing:
                facts |= {fact.instance_type: fact for fact in got[Of.FACTS]}
        return Pull(
            feed=AWS,
            at=at,
            prices=pl.DataFrame(rows, schema=PRICES),
            parts=parts,
            scores=scores,
            quotas=quotas,
            facts=tuple(facts.values()),
            offerings=offerings,
        )


def _one(call: Callable[[], list[str]], until: float) -> list[str]:
    """A call by itself, cut off at the deadline."""
    found = run_all({"one": call}, 1, until)["one"]
    if isinstance(found, Exception):
        raise found
    return found


def _by_region(ended: Mapping[tuple[str, ...], Any]) -> tuple[dict[str, dict[str, float]], str]:
    """On-demand prices by region and type; or why they are not whole."""
    prices: dict[str, dict[str, float]] = {}
    for key, value in ended.items():
        if key[0] == "price":
            if isinstance(value, Exception):
                return {}, str(value)
            for region, price in value.items():
                prices.setdefault(region, {})[key[1]] = price
    return prices, ""


def _scores(ended: Mapping[tuple[str, ...], Any]) -> tuple[list[Any], str]:
    """Those that were answered, and why others were not."""
    answered = [value for key, value in ended.items() if key[0] == "score"]
    failed = [str(value) for value in answered if isinstance(value, Exception)]
    scores = [one for value in answered if not isinstance(value, Exception) for one in value]
    return scores, failed[0] if failed else ""

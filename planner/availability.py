"""How many nodes of an offer can be had: an estimate of its own, with its reasons.

Availability is not price. What is known of it: the scenario's assumption (nobody publishes
stock), a stock that a source states, the cloud's placement score, quotas and what others use of
them, and what became of Coral's own launches. What is unknown stays the assumption.
Source: docs/formulation.md, section 5.7.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from fnmatch import fnmatchcase

from planner.types import Market

BEST_SCORE = 10
MOST_DOUBLINGS = 3  # of the time that a place is avoided

Place = tuple[str, str | None, str, Market]  # domain, zone, instance type, market


class LaunchOutcome(StrEnum):
    """What became of a launch."""

    LAUNCHED = "launched"
    NO_CAPACITY = "no_capacity"
    PREEMPTED = "preempted"  # ran, and was taken away


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """One launch's end, as the fleet saw it."""

    lease_id: str
    at: datetime
    domain: str
    zone: str | None
    instance_type: str
    market: Market
    outcome: LaunchOutcome
    detail: str = ""

    @property
    def place(self) -> Place:
        return (self.domain, self.zone, self.instance_type, self.market)


@dataclass(frozen=True, slots=True)
class Avoided:
    """A place where launches found nothing lately."""

    place: Place
    failures: int  # attempts in a row, at different times
    until: datetime
    why: LaunchOutcome


@dataclass(frozen=True, slots=True)
class PlacementScore:
    """How likely a spot request of some nodes of some types is to be met, 1 to 10."""

    score: int
    nodes: int
    instance_types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuotaState:
    """vCPUs of a family and market that the account may run in a domain."""

    domain: str
    family: str  # as people call it: 'G and VT'
    instance_types: str  # shell pattern
    market: Market
    limit_vcpus: float
    used_vcpus: float  # by what is not Coral's

    @property
    def left_vcpus(self) -> int:
        return max(0, math.floor(self.limit_vcpus - self.used_vcpus))

    def covers(self, domain: str, instance_type: str, market: Market) -> bool:
        return (self.domain, self.market) == (domain, market) and fnmatchcase(
            instance_type, self.instance_types
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of availability beyond the assumption."""

    avoided: Mapping[Place, Avoided] = field(default_factory=dict)
    scores: Mapping[tuple[str, str], PlacementScore] = field(default_factory=dict)
    quotas: Sequence[QuotaState] = ()

    def avoids(self, place: Place) -> bool:
        """Whether a place, or its domain as a whole, is avoided now."""
        domain, _, instance_type, market = place
        return place in self.avoided or (domain, None, instance_type, market) in self.avoided


@dataclass(frozen=True, slots=True)
class Availability:
    """The estimate of one offer."""

    nodes: int
    why: str  # without ages: equal evidence gives equal words


NOTHING_KNOWN = Evidence()


def avoided_places(
    results: Iterable[LaunchResult], now: datetime, minutes: float
) -> dict[Place, Avoided]:
    """Places to avoid now: after a launch without capacity, or a node taken away.

    Each further failure once the time is over doubles it, three times at most; a launch that comes
    up ends it. Failures while a place is avoided anyway count once, and so do those of one moment.
    """
    found: dict[Place, Avoided] = {}
    ordered = sorted(results, key=lambda r: (r.at, r.outcome is not LaunchOutcome.LAUNCHED))
    longest = timedelta(minutes=minutes * 2**MOST_DOUBLINGS)
    for result in ordered:
        last = found.get(result.place)
        if result.outcome is LaunchOutcome.LAUNCHED:
            found.pop(result.place, None)
            continue
        if last is not None and result.at < last.until:
            continue
        in_a_row = last is not None and result.at - last.until <= longest
        failures = last.failures + 1 if last is not None and in_a_row else 1
        lasts = timedelta(minutes=minutes * 2 ** min(failures - 1, MOST_DOUBLINGS))
        found[result.place] = Avoided(result.place, failures, result.at + lasts, result.outcome)
    return {place: avoided for place, avoided in found.items() if avoided.until > now}


def estimate_nodes(
    domain: str,
    instance_type: str,
    market: Market,
    vcpus: int,
    assumed: int,
    note: str,
    evidence: Evidence = NOTHING_KNOWN,
    stated: int | None = None,
) -> Availability:
    """Nodes of an offer that can be had, outside the places that are avoided.

    `assumed` is the scenario's assumption with its `note`; `stated` what the price's own source
    says, which replaces it. A placement score takes its share of spot nodes (at least one stays);
    a quota takes what it leaves.
    """
    nodes, why = (
        (assumed, note) if stated is None else (stated, "stated by the source of the price")
    )
    score = evidence.scores.get((domain, instance_type))
    if market is Market.SPOT and score is not None and nodes > 0:
        kept = max(1, nodes * min(score.score, BEST_SCORE) // BEST_SCORE)
        if kept < nodes:
            why += f"; placement score {score.score} of {BEST_SCORE}: {kept} of {nodes}"
        nodes = kept
    for quota in evidence.quotas:
        if quota.covers(domain, instance_type, market) and vcpus > 0:
            room = quota.left_vcpus // vcpus
            if room < nodes:
                why += f"; quota {quota.family} leaves {quota.left_vcpus} vCPUs: {room}"
            nodes = min(nodes, room)
    return Availability(nodes, why)


def describe_avoided(avoided: Sequence[Avoided]) -> str:
    """'launches of g6.xlarge (spot) in use1-az6 failed twice'."""
    parts = []
    for item in avoided:
        domain, zone, instance_type, market = item.place
        times = "" if item.failures == 1 else f", {item.failures} times in a row"
        what = "found no capacity" if item.why is LaunchOutcome.NO_CAPACITY else "was taken away"
        name = market.value.replace("_", "-")
        parts.append(f"{instance_type} ({name}) in {zone or domain} {what}{times}")
    return "; ".join(parts)

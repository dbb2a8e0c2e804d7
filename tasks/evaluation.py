"""Days replayed: a market and demand that move, plans at intervals, preemptions, and requests.

Every planner plans the same moments from where its own fleet stands, and then serves the same
requests in simulation. Source: docs/formulation.md, section 10, Days.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from catalog.seed import seed_folder
from catalog.store import Catalog
from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, NodeKey, node_key
from planner.baselines.cauchy import plan_cauchy
from planner.baselines.homo import plan_homo
from planner.demand import DemandHistory, forecast_demand
from planner.errors import CoralError, InputError
from planner.leases import Lease, LeaseState
from planner.perf.grids import Floats
from planner.replan import from_fleet, replan
from planner.types import Market, Workload
from simulator.market import MarketFit, SyntheticMarket
from simulator.measures import measure
from simulator.run import Result, simulate
from simulator.streams import mixed_trace, steady_stream
from simulator.trace import Trace
from tasks import progress
from tasks.allocation import allocation_input, read_library
from tasks.coral_task import coral_task
from tasks.evaluation_fleet import HOUR_S, FleetHistory
from tasks.evaluation_record import record_evaluation
from tasks.fleet_engines import engines_by_replica, fleet_of_plan
from tasks.inputs import Inputs
from tasks.requests import History
from tasks.simulation import read_histories

STREAMS = ("servegen-m-large", "servegen-m-mid", "servegen-m-small")  # dealt to the workloads
KNOWN_DAYS = 4  # of the streams, before the first moment
PLANNERS = ("coral", "homo", "cauchy")
LEAST_SAVING = 0.01  # of the running plan's cost, as `coral operate` asks by default
START = datetime(2026, 1, 1, tzinfo=UTC)  # of leases; nothing depends on it


@dataclass(frozen=True, slots=True)
class Replay:
    """What is replayed."""

    hours: float = 24.0
    every_minutes: float = 30.0  # between plans
    demand: float = 1.0  # times the scenario's, which the streams have as their mean of a week
    seed: int = 0
    deadline_s: float = 5.0  # of one plan


@dataclass(frozen=True, slots=True)
class Interval:
    """One planner's fleet between two plans."""

    planner: str
    hours: float  # since the beginning
    usd_per_hour: float  # of the nodes held, those that drain included
    nodes: int
    lost_nodes: int  # spot nodes that the market took
    replicas_started: int
    planned_rps: float  # served, as planned for the forecast
    demand_rps: float  # that came
    requests: int
    attainment: float
    goodput_tokens_per_s: float
    solve_s: float


@dataclass(frozen=True)
class Evaluation:
    """All planners over the same days."""

    id: str
    scenario: str
    replay: Replay
    market_source: str
    intervals: tuple[Interval, ...]
    table: Path | None = None
    plot: Path | None = None
    market: Path | None = None

    def of(self, planner: str) -> list[Interval]:
        return [each for each in self.intervals if each.planner == planner]


@dataclass(frozen=True)
class _Moment:
    """What is known when a plan is made, and what comes until the next."""

    hours: float
    data: AllocationInput


def evaluate_days(catalog: Catalog, inputs: Inputs, asked: Replay) -> Evaluation:
    """Replay the scenario for every planner, and record what came of it.

    Raises NoTemplateError: the library is not complete. InputError: a time that cannot be replayed.
    """
    if asked.hours * 60.0 < asked.every_minutes:
        raise InputError("--hours is shorter than --every: there is nothing to replan")
    data = allocation_input(inputs, read_library(catalog, inputs))
    data = replace(data, settings=replace(data.settings, deadline_s=asked.deadline_s))
    with catalog.read() as connection:
        histories = read_histories(connection)
    fit = MarketFit.of((seed_folder() / "market_fit.json").read_text(encoding="utf-8"))
    market = SyntheticMarket.draw(fit, data.offers, asked.hours, asked.seed)
    moments = _moments(data, market, histories, asked)
    trace = _requests(inputs, histories, asked)
    intervals: list[Interval] = []
    total = len(moments) * len(PLANNERS)
    for number, planner in enumerate(PLANNERS):
        report = _reporter(number * len(moments), total)
        intervals += _replay(planner, inputs, moments, market, trace, asked, report)
    progress.report("evaluate", total, total)
    found = Evaluation(uuid.uuid4().hex, inputs.scenario.name, asked, fit.source, tuple(intervals))
    return record_evaluation(catalog, found, market)


evaluate_task = coral_task("evaluate", evaluate_days)


def _reporter(before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress.report("evaluate", before + done, total)


def _moments(
    data: AllocationInput,
    market: SyntheticMarket,
    histories: Mapping[str, History],
    asked: Replay,
) -> list[_Moment]:
    horizon = data.settings.startup_minutes + asked.every_minutes
    found = []
    for number in range(int(asked.hours * 60.0 / asked.every_minutes + 1e-9)):
        hours = number * asked.every_minutes / 60.0
        workloads = []
        for place, workload in enumerate(data.workloads):
            history = _stream(histories, place)
            known = round((KNOWN_DAYS * 24.0 + hours) * 60.0 / history.window_minutes)
            rate = forecast_demand(history.until(known), horizon).rate_rps
            scale = asked.demand * workload.demand_rps / _mean_of_the_week(history)
            workloads.append(replace(workload, demand_rps=scale * rate))
        here = replace(data, workloads=tuple(workloads), offers=market.at(hours))
        found.append(_Moment(hours, here))
    return found


def _requests(inputs: Inputs, histories: Mapping[str, History], asked: Replay) -> Trace:
    """Poisson requests at the streams' rates, with the workloads' own lengths."""
    rng = np.random.default_rng(asked.seed)
    ordered = sorted(inputs.scenario.workloads, key=lambda w: w.name)
    streams = {}
    for place, workload in enumerate(ordered):
        history = _stream(histories, place)
        first = round(KNOWN_DAYS * 24.0 * 60.0 / history.window_minutes)
        last = first + int(np.ceil(asked.hours * 60.0 / history.window_minutes))
        scale = asked.demand / _mean_of_the_week(history)
        minutes = round(history.window_minutes)
        shape: Floats = np.repeat(scale * history.rates_rps[first:last], minutes)
        streams[workload.name] = steady_stream(
            workload, workload.demand_rps, 60.0 * asked.hours, rng, shape.tolist()
        )
    return mixed_trace(inputs.scenario.workloads, streams)


def _stream(histories: Mapping[str, History], place: int) -> DemandHistory:
    name = STREAMS[place % len(STREAMS)]
    return DemandHistory.of(name, *histories[name])


def _mean_of_the_week(history: DemandHistory) -> float:
    day = round(24 * 60 / history.window_minutes)
    return float(history.rates_rps[KNOWN_DAYS * day : (KNOWN_DAYS + 7) * day].mean())


def _replay(
    planner: str,
    inputs: Inputs,
    moments: Sequence[_Moment],
    market: SyntheticMarket,
    trace: Trace,
    asked: Replay,
    report: Callable[[int], None],
) -> list[Interval]:
    settings = moments[0].data.settings
    kinds = {offer.instance_type: offer.node_class for offer in moments[0].data.offers}
    fleet = FleetHistory(kinds, settings.startup_minutes / 60.0)
    overlap = (settings.startup_minutes + settings.drain_minutes) / 60.0
    every = asked.every_minutes / 60.0
    drafts = []
    for number, moment in enumerate(moments):
        report(number)
        before, held, lost = fleet.replicas, fleet.nodes, fleet.lost_nodes
        plan = _plan(planner, moment.data, fleet, asked)
        templates = {planned.template.id: planned.template for planned in plan.replicas}
        engines = engines_by_replica(fleet_of_plan(plan), templates, inputs)
        fleet.follow(plan, moment.hours, engines)
        prices = {node_key(o): o.price_usd_per_hour for o in moment.data.offers}
        paid = _usd(plan.node_counts, prices)
        paid += _usd(held - Counter(plan.node_counts), prices) * min(1.0, overlap / every)
        for at in market.steps(moment.hours, moment.hours + every):
            stock = {
                node_key(offer): market.spot_stock(offer, at)
                for offer in market.offers
                if offer.market is Market.SPOT
            }
            gone = fleet.nodes
            fleet.lose(market.offers, stock, at)
            left = (moment.hours + every - at) / every
            paid -= _usd(gone - fleet.nodes, prices) * left
        drafts.append(
            Interval(
                planner, moment.hours, paid, sum(fleet.nodes.values()), fleet.lost_nodes - lost,
                sum((Counter(plan.replica_counts) - before).values()),
                sum(s.served_rps for s in plan.services), 0.0, 0, 0.0, 0.0, plan.solve_s,
            )
        )  # fmt: skip
    result = simulate(fleet.engines(), trace, inputs.performance, fleet.events(), fleet.plans)
    return [_measured(draft, result, inputs.scenario.workloads, every) for draft in drafts]


def _plan(planner: str, data: AllocationInput, fleet: FleetHistory, asked: Replay) -> Plan:
    """Plan from where the fleet stands; the baselines' best order, to their advantage."""
    nodes, replicas = fleet.nodes, fleet.replicas
    here = from_fleet(data, ready_leases(data, nodes), replicas)
    match planner:
        case "coral":
            return replan(here, replicas, nodes, LEAST_SAVING).plan
        case "homo":
            return plan_homo(here).best
        case "cauchy":
            return plan_cauchy(here).best
    raise CoralError(f"unknown planner {planner!r}")


def ready_leases(data: AllocationInput, nodes: Mapping[NodeKey, int]) -> list[Lease]:
    """A ready lease for each node, at its offer's price."""
    offers = {node_key(offer): offer for offer in data.offers}
    return [
        Lease(
            f"{number}-{key}", *key[:2], offers[key].node_class, key[2],
            offers[key].price_usd_per_hour, LeaseState.READY, START,
        )
        for key, count in nodes.items()
        for number in range(count)
    ]  # fmt: skip


def _usd(nodes: Mapping[NodeKey, int], prices: Mapping[NodeKey, float]) -> float:
    return sum(prices[key] * count for key, count in nodes.items())


def _measured(
    draft: Interval, result: Result, workloads: Sequence[Workload], every_hours: float
) -> Interval:
    """With what the requests of the interval met."""
    begin = draft.hours * HOUR_S
    end = begin + every_hours * HOUR_S
    found = measure(result, {w.name: w.slo for w in workloads}, (begin, end))
    requests = sum(m.requests for m in found)
    good = sum(m.attainment * m.requests for m in found)
    return replace(
        draft,
        demand_rps=requests / (end - begin),
        requests=requests,
        attainment=good / requests if requests else 1.0,
        goodput_tokens_per_s=sum(m.goodput_tokens_per_s for m in found),
    )

"""Days replayed: a market and demand that move, plans at intervals, preemptions, and requests.

Every planner plans at the same intervals from where its own fleet stands, and at once where the
market took nodes of it, as `coral operate` does; then it serves the same requests in simulation.
Source: docs/formulation.md, section 10, Days.
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
EPSILON = 1e-6  # hours
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
    solve_s: float  # mean of its plans
    plans: int = 1  # those after losses included


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
class _Known:
    """What is known when a plan is made."""

    data: AllocationInput
    market: SyntheticMarket
    histories: Mapping[str, History]
    asked: Replay

    def at(self, hours: float) -> AllocationInput:
        """Offers of that time, and demand forecast over a start-up and an interval."""
        horizon = self.data.settings.startup_minutes + self.asked.every_minutes
        workloads = []
        for place, workload in enumerate(self.data.workloads):
            history = _stream(self.histories, place)
            windows = int((KNOWN_DAYS * 24.0 + hours) * 60.0 / history.window_minutes + 1e-9)
            rate = forecast_demand(history.until(windows), horizon).rate_rps
            scale = self.asked.demand * workload.demand_rps / _mean_of_the_week(history)
            workloads.append(replace(workload, demand_rps=scale * rate))
        return replace(self.data, workloads=tuple(workloads), offers=self.market.at(hours))


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
    known = _Known(data, market, histories, asked)
    trace = _requests(inputs, histories, asked)
    intervals: list[Interval] = []
    count = int(asked.hours * 60.0 / asked.every_minutes + 1e-9)
    total = count * len(PLANNERS)
    for number, planner in enumerate(PLANNERS):
        report = _reporter(number * count, total)
        intervals += _replay(planner, inputs, known, count, trace, report)
    progress.report("evaluate", total, total)
    found = Evaluation(uuid.uuid4().hex, inputs.scenario.name, asked, fit.source, tuple(intervals))
    return record_evaluation(catalog, found, market)


evaluate_task = coral_task("evaluate", evaluate_days)


def _reporter(before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress.report("evaluate", before + done, total)


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
    known: _Known,
    count: int,
    trace: Trace,
    report: Callable[[int], None],
) -> list[Interval]:
    settings, every = known.data.settings, known.asked.every_minutes / 60.0
    kinds = {offer.instance_type: offer.node_class for offer in known.data.offers}
    fleet = FleetHistory(kinds, settings.startup_minutes / 60.0)
    drafts = []
    for number in range(count):
        report(number)
        drafts.append(_interval(planner, inputs, known, fleet, number * every))
    result = simulate(fleet.engines(), trace, inputs.performance, fleet.events(), fleet.plans)
    return [_measured(draft, result, inputs.scenario.workloads, every) for draft in drafts]


def _interval(
    planner: str, inputs: Inputs, known: _Known, fleet: FleetHistory, begin: float
) -> Interval:
    """A plan, what the market takes until the next, and a plan after every loss."""
    settings, market = known.data.settings, known.market
    every, lost = known.asked.every_minutes / 60.0, fleet.lost_nodes
    overlap = (settings.startup_minutes + settings.drain_minutes) / 60.0
    usd, started, solve_s, made = 0.0, 0, 0.0, 0
    planned_rps, at, is_due = 0.0, begin, True
    for step in [*market.steps(begin, begin + every - EPSILON), begin + every]:
        if is_due:
            data, before, held = known.at(at), fleet.replicas, fleet.nodes
            plan = _plan(planner, data, fleet, known.asked)
            templates = {planned.template.id: planned.template for planned in plan.replicas}
            fleet.follow(plan, at, engines_by_replica(fleet_of_plan(plan), templates, inputs))
            prices = {node_key(o): o.price_usd_per_hour for o in data.offers}
            usd += overlap * _usd(held - Counter(plan.node_counts), prices)
            started += sum((Counter(plan.replica_counts) - before).values())
            planned_rps = planned_rps if made else sum(s.served_rps for s in plan.services)
            solve_s, made = solve_s + plan.solve_s, made + 1
        usd += (step - at) * _usd(fleet.nodes, prices)
        stock = {
            node_key(offer): market.spot_stock(offer, step)
            for offer in market.offers
            if offer.market is Market.SPOT
        }
        gone = fleet.lost_nodes
        fleet.lose(market.offers, stock, step)
        at, is_due = step, fleet.lost_nodes > gone
    return Interval(
        planner, begin, usd / every, sum(fleet.nodes.values()), fleet.lost_nodes - lost, started,
        planned_rps, 0.0, 0, 0.0, 0.0, solve_s / made, made,
    )  # fmt: skip


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

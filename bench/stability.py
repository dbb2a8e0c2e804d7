"""Re-planning on a moving market and demand: what changes, what it costs, and against no penalty.

    python -m bench.stability --scenario core --hours 24 --every 30 --json

The same day is replayed twice: as `coral operate` plans (new nodes, nodes given back and replicas
that end cost what the scenario says, small savings move nothing), and with a penalty of zero. Both
are charged with what their changes cost in truth: the scenario's start-up, drain and restart
minutes of the nodes concerned. Unserved are requests beyond what was planned for when they came.
"""

from __future__ import annotations

import argparse
import json
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.moving_market import Moment, MovingMarket
from bench.scenarios import built_library
from planner.allocation.problem import AllocationInput, NodeKey, node_key
from planner.replan import from_fleet, replan
from planner.replicas import Replica, follow
from tasks.evaluation import ready_leases
from tasks.scenario_file import read_scenario

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One replay's sums."""

    policy: str
    plans: int
    moves: int  # plans that changed the fleet's plan
    nodes_started_per_hour: float
    nodes_ended_per_hour: float
    replicas_started_per_hour: float
    replicas_ended_per_hour: float
    rent_usd_per_hour: float
    change_usd_per_hour: float
    unserved_share: float
    median_solve_s: float

    @property
    def usd_per_hour(self) -> float:
        return self.rent_usd_per_hour + self.change_usd_per_hour


def replay(
    moments: list[Moment], policy: str, least_saving: float, every_minutes: float
) -> Outcome:
    """Plan at every moment from where the last plan left the fleet."""
    true = moments[0].data.settings
    planned_with = true
    if policy == "no penalty":
        planned_with = replace(true, startup_minutes=0.0, drain_minutes=0.0, restart_minutes=0.0)
        least_saving = 0.0
    nodes: Counter[NodeKey] = Counter()
    replicas: dict[tuple[str, str], int] = {}
    running: tuple[Replica, ...] = ()
    started = ended = replicas_started = replicas_ended = moves = 0
    rent = change = unserved = came = 0.0
    seconds = []
    for number, moment in enumerate(moments):
        now = START + timedelta(hours=moment.hours)
        asked = replace(moment.data, settings=planned_with)
        data = from_fleet(asked, ready_leases(asked, nodes), replicas)
        found = replan(data, replicas, nodes, least_saving)
        plan = found.plan
        moves += found.moves and number > 0
        seconds.append(plan.solve_s)
        wanted = Counter(plan.node_counts)
        replicas = plan.replica_counts
        changes = follow(running, replicas, "replay", now, lambda: uuid.uuid4().hex)
        running = (*changes.kept, *changes.started)
        if number > 0:
            replicas_started += len(changes.started)
            replicas_ended += len(changes.ended)
            started += sum((wanted - nodes).values())
            ended += sum((nodes - wanted).values())
            change += _change_usd(replace(data, settings=true), nodes, wanted, changes.ended)
        rent += plan.cost_usd_per_hour * every_minutes / 60.0
        served = {s.workload: s.served_rps for s in plan.services}
        for name, rates in moment.came_rps.items():
            came += float(rates.sum())
            unserved += float(np.maximum(rates - served[name], 0.0).sum())
        nodes = wanted
    hours = len(moments) * every_minutes / 60.0
    return Outcome(
        policy, len(moments), moves, started / hours, ended / hours, replicas_started / hours,
        replicas_ended / hours, rent / hours, change / hours, unserved / came,
        float(np.median(seconds)),
    )  # fmt: skip


def _change_usd(
    data: AllocationInput,
    before: Counter[NodeKey],
    after: Counter[NodeKey],
    ended: tuple[Replica, ...],
) -> float:
    """Start-ups, drains and restarts at the scenario's minutes."""
    prices = {node_key(offer): offer.price_usd_per_hour for offer in data.offers}
    settings, templates = data.settings, {t.id: t for t in data.templates}
    total = sum(prices[key] * n * settings.startup_minutes for key, n in (after - before).items())
    total += sum(prices[key] * n * settings.drain_minutes for key, n in (before - after).items())
    restarts = sum(data.restart_usd(templates[r.template_id], r.domain) for r in ended)
    return total / 60.0 + restarts


def main() -> None:
    """Parse, replay both policies, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenario", default="core")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--every", type=float, default=30.0, help="minutes between plans")
    parser.add_argument("--demand", type=float, default=0.5, help="times the scenario's")
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds of one plan")
    parser.add_argument("--home", help="a Coral home whose library is used")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    spec = read_scenario(options.scenario)
    spec = spec.model_copy(update={"demand_scale": options.demand * spec.demand_scale})
    with TemporaryDirectory() as folder:
        data = built_library(spec, Path(options.home or folder))
    settings = replace(data.settings, deadline_s=options.deadline, relative_gap=1e-3)
    horizon = settings.startup_minutes + options.every
    market = MovingMarket(replace(data, settings=settings), horizon)
    moments = list(market.moments(options.hours, options.every))
    saving = spec.operate.least_saving_share
    outcomes = [
        replay(moments, policy, saving, options.every) for policy in ("operate", "no penalty")
    ]
    table = Table("", *(outcome.policy for outcome in outcomes))
    for name in asdict(outcomes[0]):
        if name != "policy":
            table.add_row(name, *(f"{getattr(outcome, name):.4g}" for outcome in outcomes))
    table.add_row("usd_per_hour", *(f"{outcome.usd_per_hour:.4g}" for outcome in outcomes))
    Console(stderr=options.json).print(table)
    if options.json:
        rows = [{**asdict(o), "usd_per_hour": o.usd_per_hour} for o in outcomes]
        print(json.dumps({"hours": options.hours, "every_minutes": options.every, "rows": rows}))


if __name__ == "__main__":
    main()

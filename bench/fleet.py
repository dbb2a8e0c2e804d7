"""The fleet under chaos, and how long a round of many nodes takes its controller.

    python -m bench.fleet --json

`schedules` runs of rounds against a simulated cloud with faults (bench/chaos.py), kills between any
two steps included; `aws` is the same of the AWS fleet over HTTP (bench/chaos_aws.py); `real_kills`
controllers in processes of their own that get SIGKILL at a random moment, with leases and cloud in
files; then both come to rest and are compared. `caught` are controllers with one mistake each
(bench/chaos_bugs.py) that the same chaos finds. `round_s` are seconds of a controller that brings
up so many nodes from nothing, looks at them when nothing is to be done, and ends them all, with
leases in SQLite and a cloud that answers at once; `far_away_s` are those of launching and ending
them where a call takes 0.2 s and 16 are made side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.chaos import OFFERS, START, bring, offer, run_schedule
from bench.chaos_bugs import BUGS
from executor.apply import apply_actions, end_all, settle
from executor.fleet import Launched, TransientError
from executor.lease_store import SqliteLeaseStore
from executor.simulated import SimulatedFleet
from planner.leases import Lease, held_nodes, reconcile
from planner.types import Market

MISTAKES = ("leaked", "double", "lost", "unconverged", "unwritten", "unconfirmed", "overspent",
            "surplus")  # fmt: skip
BUG_SCHEDULES = 400
LONG = timedelta(seconds=200)
ROUND_TRIP_S, AT_ONCE = 0.2, 16  # of RunInstances, roughly; as the AWS fleet asks


class LossyFleet(SimulatedFleet):
    """Sometimes does what it is asked and does not say so; waits a little, so that kills land."""

    def launch(self, lease: Lease, now: datetime) -> Launched:
        """As the protocol says."""
        time.sleep(random.random() * 0.004)
        found = super().launch(lease, now)
        if random.random() < 0.2:
            raise TransientError("the answer was lost")
        return found


def controller(folder: Path, seed: int) -> None:
    """Rounds without end, with plans that change: the process that is killed."""
    rng = random.Random(seed)
    random.seed(seed)
    store = SqliteLeaseStore(folder / "leases.sqlite")
    fleet = LossyFleet(startup_minutes=5.0, failure_rate=0.1, seed=7, path=folder / "cloud.sqlite")
    now = START + timedelta(hours=seed)
    (folder / f"begun-{seed}").touch()
    while True:
        wanted = {key: rng.randrange(5) for key in OFFERS}
        bring(store, fleet, wanted, now)
        now += timedelta(seconds=rng.choice([5, 60, 300]))


def kill_for_real(kills: int, folder: Path) -> dict[str, int]:
    """Kill so many controllers that work on one home; what is wrong after a quiet end."""
    rng = random.Random(1)
    for number in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.fleet", "--controller", str(folder), str(number)]
        )
        ready = folder / "leases.sqlite"
        before = ready.stat().st_mtime_ns if ready.exists() else 0
        while process.poll() is None and (not ready.exists() or ready.stat().st_mtime_ns == before):
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.8))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    store = SqliteLeaseStore(folder / "leases.sqlite")
    fleet = SimulatedFleet(startup_minutes=5.0, seed=7, path=folder / "cloud.sqlite")
    now, wanted = START + timedelta(hours=kills + 1), dict.fromkeys(OFFERS, 2)
    for _ in range(5):
        bring(store, fleet, wanted, now)
        now += LONG
    leases = store.all()
    held = {lease.id for lease in leases if lease.state.is_held}
    alive = Counter(one.lease_id for one in fleet.instances(now) if one.state.lives)
    return {
        "leaked": sum(count for name, count in alive.items() if name not in held),
        "double": sum(count > 1 for count in alive.values()),
        "lost": sum(name not in alive for name in held),
        "unconverged": int(held_nodes(leases) != wanted),
        "leases": len(leases),
    }


class DistantFleet(SimulatedFleet):
    """Each call takes a round trip."""

    def launch(self, lease: Lease, now: datetime) -> Launched:
        """As the protocol says."""
        time.sleep(ROUND_TRIP_S)
        return super().launch(lease, now)

    def terminate(self, instance_id: str) -> None:
        """As the protocol says."""
        time.sleep(ROUND_TRIP_S)
        super().terminate(instance_id)


def far_away(nodes: int, at_once: int, folder: Path) -> dict[str, float]:
    """Seconds to launch so many nodes, and to end them, at a cloud that takes its time."""
    name = f"far-{at_once}"
    store = SqliteLeaseStore(folder / f"{name}.sqlite")
    fleet = DistantFleet(path=folder / f"{name}-cloud.sqlite", at_once=at_once)
    began = time.perf_counter()
    actions = reconcile({sorted(OFFERS)[0]: nodes}, OFFERS, settle(store, fleet, START))
    apply_actions(store, fleet, actions, START)
    launched = time.perf_counter()
    end_all(store, fleet, store.all(), START)
    ended = time.perf_counter()
    return {"launch": round(launched - began, 1), "end": round(ended - launched, 1)}


def over_http(schedules: int) -> dict[str, int]:
    """The AWS fleet's own schedules, against a local AWS; what is wrong after them."""
    from bench.chaos_aws import run_aws_schedule
    from executor.aws.clients import AwsClients
    from executor.aws.fleet import AwsFleet
    from executor.aws.regions import RegionSettings
    from tests.support.aws_answers import IMAGE
    from tests.support.aws_server import AwsServer

    kind, regions = "g6.xlarge", ("us-east-1", "us-west-2")
    keys = {
        (f"aws:{regions[0]}", kind, Market.SPOT): ["use1-az1", "use1-az2"],
        (f"aws:{regions[1]}", kind, Market.ON_DEMAND): ["usw2-az1", "usw2-az2"],
    }
    offers = {
        key: replace(offer(key[0], 0.5, key[2]), instance_type=kind, zone=zones[0])
        for key, zones in keys.items()
    }
    total, began = Counter[str](), datetime.now(UTC)
    with AwsServer() as server, server.environment():
        for seed in range(schedules):
            fleet = AwsFleet(
                AwsClients(attempts=1), f"chaos{seed}", regions, RegionSettings(IMAGE), keys
            )
            outcome = run_aws_schedule(seed, server, fleet, offers, began)
            total.update(outcome.found)
            total.update({"crash_points": outcome.boundaries, "kills": outcome.kills})
            for one in fleet.instances(began):
                fleet.terminate(one.id)
    names = ("leaked", "double", "lost", "unconverged", "crash_points", "kills")
    return {"schedules": schedules, **{name: total[name] for name in names}}


def caught(bug: str) -> bool:
    """Whether the chaos finds a mistake."""
    with BUGS[bug]():
        return any(sum(run_schedule(seed).found.values()) for seed in range(BUG_SCHEDULES))


def rounds_of(nodes: int, folder: Path) -> dict[str, float]:
    """Seconds of a round that launches all, of one that does nothing, of one that ends all."""
    store, fleet = SqliteLeaseStore(folder / "many.sqlite"), SimulatedFleet()
    now, wanted = START, {sorted(OFFERS)[0]: nodes}
    found = {}
    for name in ("launch", "nothing"):
        began = time.perf_counter()
        actions = reconcile(wanted, OFFERS, settle(store, fleet, now))
        apply_actions(store, fleet, actions, now)
        found[name] = round(time.perf_counter() - began, 3)
        now += timedelta(hours=1)
        settle(store, fleet, now)  # they come up
    began = time.perf_counter()
    end_all(store, fleet, store.all(), now)
    found["end"] = round(time.perf_counter() - began, 3)
    return found


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--aws-schedules", type=int, default=40)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--controller", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.controller:
        controller(Path(options.controller[0]), int(options.controller[1]))
    started = datetime.now(UTC)
    total: Counter[str] = Counter()
    boundaries = kills = 0
    for seed in range(options.schedules):
        outcome = run_schedule(seed)
        total.update(outcome.found)
        boundaries, kills = boundaries + outcome.boundaries, kills + outcome.kills
    with TemporaryDirectory() as folder:
        real = kill_for_real(options.kills, Path(folder))
        times = rounds_of(options.nodes, Path(folder))
        far = far_away(options.nodes, AT_ONCE, Path(folder))
    aws = over_http(options.aws_schedules)
    found = {name: caught(name) for name in BUGS}
    result: dict[str, Any] = {
        "schedules": options.schedules,
        **{name: total[name] for name in MISTAKES},
        "crash_points": boundaries,
        "kills": kills,
        "aws": aws,
        "real_kills": options.kills,
        "after_real_kills": real,
        "bugs": len(found),
        "caught": sum(found.values()),
        "uncaught": [name for name, seen in found.items() if not seen],
        "nodes": options.nodes,
        "round_s": times,
        "far_away_s": far,
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 1),
    }
    if options.json:
        print(json.dumps(result))
        return
    print("\n".join(f"{name}: {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()

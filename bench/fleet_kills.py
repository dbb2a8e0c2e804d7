"""Real kills: SIGKILL to processes of a fleet at random moments, then a quiet end and a count.

Rounds: processes that move a simulated fleet, with leases and cloud in files. Agents and
controllers: those of a local fleet, with a small server in the place of vLLM.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil

from bench.chaos import OFFERS, START, bring, offer
from executor.apply import apply_actions, end_all, settle
from executor.deployment import (
    Deployment,
    EngineSpec,
    NodeSpec,
    ReplicaSpec,
    StageSpec,
    write_deployment,
)
from executor.fleet import Launched, TransientError
from executor.home import HomeFiles
from executor.lease_store import SqliteLeaseStore
from executor.local import ADDRESS, LocalFleet
from executor.routes import read_routes
from executor.simulated import SimulatedFleet
from planner.leases import Lease, LeaseKey, held_nodes, reconcile
from planner.types import Market, Phase

LONG = timedelta(seconds=200)
NODES = 3  # of the local fleet
FAKE_ENGINE = Path(__file__).parents[1] / "tests" / "executor" / "fake_engine.py"
MODEL = "model"
KEY: LeaseKey = ("local:here", "node", Market.ON_DEMAND)
READY_S = 60.0  # for everything to answer once nobody kills


class LossyFleet(SimulatedFleet):
    """Sometimes does what it is asked and does not say so; waits a little, so that kills land."""

    def launch(self, lease: Lease, now: datetime) -> Launched:
        """As the protocol says."""
        time.sleep(random.random() * 0.004)
        found = super().launch(lease, now)
        if random.random() < 0.2:
            raise TransientError("the answer was lost")
        return found


def rounds_without_end(folder: Path, seed: int) -> None:
    """With plans that change: the process that is killed."""
    rng = random.Random(seed)
    random.seed(seed)
    store = SqliteLeaseStore(HomeFiles(folder).leases)
    fleet = LossyFleet(startup_minutes=5.0, failure_rate=0.1, seed=7, path=folder / "cloud.sqlite")
    now = START + timedelta(hours=seed)
    while True:
        wanted = {key: rng.randrange(5) for key in OFFERS}
        bring(store, fleet, wanted, now)
        now += timedelta(seconds=rng.choice([5, 60, 300]))


def kill_rounds(kills: int, folder: Path) -> dict[str, int]:
    """Kill so many processes that move one fleet; what is wrong after a quiet end."""
    rng = random.Random(1)
    for number in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.fleet_kills", str(folder), str(number)]
        )
        ready = HomeFiles(folder).leases
        before = ready.stat().st_mtime_ns if ready.exists() else 0
        while process.poll() is None and (not ready.exists() or ready.stat().st_mtime_ns == before):
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.8))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    store = SqliteLeaseStore(HomeFiles(folder).leases)
    fleet = SimulatedFleet(startup_minutes=5.0, seed=7, path=folder / "cloud.sqlite")
    now, wanted = START + timedelta(hours=kills + 1), dict.fromkeys(OFFERS, 2)
    for _ in range(5):
        bring(store, fleet, wanted, now)
        now += LONG
    leases = store.all()
    held = {lease.id for lease in leases if lease.state.is_held}
    alive = Counter(one.lease_id for one in fleet.instances(now) if one.state.lives)
    return {
        "kills": kills,
        "leaked": sum(count for name, count in alive.items() if name not in held),
        "double": sum(count > 1 for count in alive.values()),
        "lost": sum(name not in alive for name in held),
        "unconverged": int(held_nodes(leases) != wanted),
        "leases": len(leases),
    }


def kill_agents(kills: int, home: Path) -> dict[str, int]:
    """Kill so many agents, and every third time the controller; what is wrong after a quiet end.

    Every lease has one replica, of one engine. `leaked` are agents and engines that nobody wants,
    also once all is ended; `lost` are leases without an agent; `unconverged` is 1 where what is
    wanted does not answer.
    """
    rng, counts = random.Random(2), Counter[str]()
    store = SqliteLeaseStore(HomeFiles(home).leases)
    fleet = LocalFleet(home, {KEY[1]: ((("0",),) * NODES)})
    with _controller(home) as start:
        daemon = start()
        for number in range(kills):
            _round(store, fleet, rng.randrange(1, NODES + 1))
            time.sleep(rng.uniform(0.0, 2.0))
            agents = _agents(home)
            victim = daemon if number % 3 == 2 or not agents else rng.choice(agents)
            with suppress(psutil.NoSuchProcess):
                victim.kill()
                counts["controllers" if victim is daemon else "agents"] += 1
            if victim is daemon:
                daemon.wait()
                daemon = start()
        ends = time.monotonic() + READY_S
        while time.monotonic() < ends and not _answers(store, home):
            _round(store, fleet, NODES)
            time.sleep(1.0)
        held = {lease.id for lease in store.all() if lease.state.is_held}
        alive = Counter(one.lease_id for one in fleet.instances(_now()) if one.state.lives)
        found = {
            "kills": sum(counts.values()), **counts, "leases": len(store.all()),
            "leaked": sum(n for name, n in alive.items() if name not in held)
            + abs(len(_agents(home)) - NODES) + abs(len(_engines(home)) - NODES),
            "double": sum(n > 1 for n in alive.values()),
            "lost": sum(name not in alive for name in held),
            "unconverged": int(len(held) != NODES or not _answers(store, home)),
        }  # fmt: skip
        end_all(store, fleet, store.all(), _now())
        ends = time.monotonic() + READY_S
        while time.monotonic() < ends and (_agents(home) or _engines(home)):
            settle(store, fleet, _now())
            time.sleep(0.5)
        found["leaked"] += len(_agents(home)) + len(_engines(home))
        found["unconverged"] += int(any(not lease.state.is_over for lease in store.all()))
    return found


@contextmanager
def _controller(home: Path) -> Iterator[Callable[[], psutil.Popen]]:
    """What starts one; the last one ends with the block."""
    started: list[psutil.Popen] = []

    def start() -> psutil.Popen:
        with (home / "controller.log").open("ab") as log:
            started.append(
                psutil.Popen(
                    [sys.executable, "-m", "coral", "controller", "--home", str(home)],
                    stdout=log,
                    stderr=log,
                )
            )
        ends = time.monotonic() + READY_S
        while (LocalFleet(home).controller() or {}).get("pid") != started[-1].pid:
            if time.monotonic() > ends:
                raise SystemExit((home / "controller.log").read_text()[-2000:])
            time.sleep(0.05)
        return started[-1]

    try:
        yield start
    finally:
        for one in started[-1:]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
            one.wait()


def _round(store: SqliteLeaseStore, fleet: LocalFleet, nodes: int) -> None:
    """As `operate` moves a local fleet."""
    now = _now()
    offers = {KEY: replace(offer(KEY[0], 1.0, KEY[2]), instance_type=KEY[1])}
    leases = settle(store, fleet, now)
    actions = reconcile({KEY: nodes}, offers, leases)
    apply_actions(store, fleet, actions, now, between=lambda _: _deploy(store, fleet))


def _deploy(store: SqliteLeaseStore, fleet: LocalFleet) -> None:
    """One replica on every held lease whose agent runs."""
    held = [lease.id for lease in store.all() if lease.state.is_held]
    slots = {name: slot for name in held if (slot := fleet.slot(name)) is not None}
    replicas = tuple(
        ReplicaSpec(
            id=name, model=MODEL, phase=Phase.AGGREGATED,
            stages=(StageSpec(first_layer=0, layers=1, nodes=(NodeSpec(
                lease_id=name, address=ADDRESS, first_port=slot.first_port, node_class="node x1",
                tensor_parallel_size=1, data_parallel_size=1, batch=1,
            ),)),),
        )
        for name, slot in slots.items()
    )  # fmt: skip
    engine = EngineSpec(
        command=(sys.executable, str(FAKE_ENGINE)), model_path=str(fleet.home / MODEL),
        max_model_len=64,
    )  # fmt: skip
    keys = {name: fleet.public_key(name) for name in held}
    content = Deployment(engines={MODEL: engine}, lease_keys=keys, replicas=replicas)
    write_deployment(fleet.files.deployment, content)


def _answers(store: SqliteLeaseStore, home: Path) -> bool:
    """Whether so many leases as are wanted are held, and all of them are routed to."""
    held = {lease.id for lease in store.all() if lease.state.is_held}
    routed = {route.replica_id for route in read_routes(HomeFiles(home).routes).routes}
    return len(held) == NODES and held == routed


def _agents(home: Path) -> list[psutil.Process]:
    return _processes("agent", str(home / "agents"))


def _engines(home: Path) -> list[psutil.Process]:
    return _processes("serve", str(home / MODEL))


def _processes(word: str, place: str) -> list[psutil.Process]:
    """Those whose command has the word and something in the place."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            there = word in words and any(one.startswith(place) for one in words)
            if there and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _now() -> datetime:
    return datetime.now(UTC)


if __name__ == "__main__":
    rounds_without_end(Path(sys.argv[1]), int(sys.argv[2]))

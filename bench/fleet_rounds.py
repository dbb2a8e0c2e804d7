"""How long a round of many nodes takes: in the controller, at a distant cloud, over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import patch

import psutil

from bench.chaos import OFFERS, START, offer
from executor.apply import apply_actions, end_all, settle
from executor.fleet import Fleet, Launched
from executor.lease_store import SqliteLeaseStore
from executor.simulated import SimulatedFleet
from planner.leases import Lease, LeaseKey, reconcile
from planner.types import Market, Offer

ROUND_TRIP_S = 0.2  # of RunInstances, roughly
REGIONS, KIND = ("us-east-1", "us-west-2"), "g6.xlarge"


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


def rounds_of(nodes: int, folder: Path) -> dict[str, float]:
    """Seconds of a round that launches all, of one that does nothing, of one that ends all."""
    store, fleet = SqliteLeaseStore(folder / "many.sqlite"), SimulatedFleet()
    wanted = {sorted(OFFERS)[0]: nodes}
    return {
        name: round(seconds["wall"], 3)
        for name, seconds in _rounds(store, fleet, wanted, OFFERS, START, _wall).items()
    }


def rounds_at_aws(nodes: int, folder: Path) -> dict[str, dict[str, float]]:
    """The same of the AWS fleet against a local AWS in a process of its own.

    `wall` has both; `controller_cpu` are the processor's seconds of this process, all its threads,
    `server_cpu` those of the local AWS.
    """
    from executor.aws.clients import AwsClients
    from executor.aws.fleet import AwsFleet
    from executor.aws.regions import RegionSettings
    from executor.aws.user_data import NodeBoot, this_coral, user_data
    from tests.support.aws_answers import IMAGE

    def script(lease: Lease) -> str:
        return user_data(
            NodeBoot(
                lease_id=lease.id,
                controller="tcp://10.0.0.1:7000",
                enrol="tcp://10.0.0.1:7001",
                controller_key="k" * 40,
                ticket="0" * 32,
                root="/opt/coral",
                coral=(this_coral(),),
                engine=("vllm==0.32.0",),
            )
        )

    keys = [(f"aws:{name}", KIND, Market.ON_DEMAND) for name in REGIONS]
    offers = {key: replace(offer(key[0], 0.8, key[2]), instance_type=KIND) for key in keys}
    wanted = {key: nodes // len(keys) for key in keys}
    store = SqliteLeaseStore(folder / "aws.sqlite")
    with local_aws() as (variables, server), patch.dict(os.environ, variables):
        fleet = AwsFleet(
            AwsClients(), "many", REGIONS, RegionSettings(IMAGE), user_data=script, drain_s=0.0
        )

        def clock() -> dict[str, float]:
            times = server.cpu_times()
            return {
                **_wall(), "controller_cpu": time.process_time(),
                "server_cpu": times.user + times.system,
            }  # fmt: skip

        found = _rounds(store, fleet, wanted, offers, datetime.now(UTC), clock)
    return {name: {k: round(v, 2) for k, v in seconds.items()} for name, seconds in found.items()}


def _rounds(
    store: SqliteLeaseStore, fleet: Fleet, wanted: Mapping[LeaseKey, int],
    offers: Mapping[LeaseKey, Offer], now: datetime, clock: Callable[[], dict[str, float]],
) -> dict[str, dict[str, float]]:  # fmt: skip
    found = {}
    for name in ("launch", "nothing"):
        began = clock()
        actions = reconcile(wanted, offers, settle(store, fleet, now))
        applied = apply_actions(store, fleet, actions, now)
        found[name] = _since(began, clock)
        expected = sum(wanted.values()) if name == "launch" else 0
        if (applied.launched, applied.failed) != (expected, 0):
            raise SystemExit(f"{name}: {applied}")
        now += timedelta(minutes=25)
        settle(store, fleet, now)  # they come up
    began = clock()
    end_all(store, fleet, store.all(), now)
    found["end"] = _since(began, clock)
    if any(not lease.state.is_over for lease in store.all()):
        raise SystemExit("nodes that did not end")
    return found


def _wall() -> dict[str, float]:
    return {"wall": time.perf_counter()}


def _since(began: Mapping[str, float], clock: Callable[[], dict[str, float]]) -> dict[str, float]:
    return {name: seconds - began[name] for name, seconds in clock().items()}


@contextmanager
def local_aws() -> Iterator[tuple[Mapping[str, str], psutil.Process]]:
    """Its environment, and its process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.fleet_rounds"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        said = process.stdout.readline() if process.stdout else ""
        yield json.loads(said), psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def serve() -> None:
    """The local AWS until its input ends; its environment is the first line of its output."""
    from tests.support.aws_server import AwsServer

    with AwsServer() as server:
        print(json.dumps(server.variables()), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    serve()

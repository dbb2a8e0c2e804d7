"""The fleet's chaos over HTTP: the AWS fleet against a local AWS that throttles and forgets.

A schedule is some rounds of a controller with kills between any two steps, answers that are lost
after the deed, throttling, zones without capacity, and instances that users end or stop by hand;
then AWS is quiet and what is there is compared with what is written. Calls are made side by side,
so that a schedule is drawn from its seed, but not every interleaving.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from threading import Lock
from typing import Any

import boto3

from bench.chaos import Findings, KillableFleet, KillableStore, Killed, MemoryStore, Outcome
from executor.apply import apply_actions, settle
from executor.aws.fleet import AwsFleet
from executor.fleet import Launched, TransientError
from planner.cloud_site import region_of
from planner.leases import Lease, LeaseKey, held_nodes, reconcile
from planner.types import Offer
from tests.support.aws_answers import zone_names
from tests.support.aws_server import AwsServer

ROUNDS, QUIET_ROUNDS = 6, 4
THROTTLED = "RequestLimitExceeded"


class BadLine:
    """Answers are lost on their way."""

    kind = "aws"

    def __init__(self, fleet: AwsFleet, rng: random.Random) -> None:
        self.fleet, self.rng, self.bad, self.lock = fleet, rng, True, Lock()
        self.at_once, self.drain_s = fleet.at_once, 0.0

    def launch(self, lease: Lease, now: datetime) -> Launched:
        """As the protocol says."""
        found = self.fleet.launch(lease, now)
        self._perhaps(0.3)
        return found

    def terminate(self, instance_id: str) -> None:
        """As the protocol says."""
        self.fleet.terminate(instance_id)
        self._perhaps(0.2)

    def instances(self, now: datetime) -> Any:
        """As the protocol says."""
        self._perhaps(0.1)
        return self.fleet.instances(now)

    def elsewhere(self, lease: Lease) -> str | None:
        """As the protocol says."""
        return self.fleet.elsewhere(lease)

    def calls(self, lease: Lease) -> list[str]:
        """As the protocol says."""
        return self.fleet.calls(lease)

    def _perhaps(self, share: float) -> None:
        with self.lock:
            lost = self.bad and self.rng.random() < share
        if lost:
            raise TransientError("the answer was lost")


def run_aws_schedule(
    seed: int, server: AwsServer, fleet: AwsFleet, offers: Mapping[LeaseKey, Offer], now: datetime
) -> Outcome:
    """One schedule; the fleet is of this schedule alone."""
    rng, memory, findings = random.Random(seed), MemoryStore(), Findings()
    line, store = BadLine(fleet, rng), KillableStore(memory, findings)
    killable, kills = KillableFleet(line, store), 0
    wanted: dict[LeaseKey, int] = {}
    for _ in range(ROUNDS):
        now += timedelta(seconds=rng.choice([5, 90, 300]))
        wanted = {key: rng.randrange(3) for key in offers}
        _trouble(rng, server, fleet, now)
        store.left = rng.randrange(12) if rng.random() < 0.6 else None
        try:
            leases = settle(store, killable, now)
            apply_actions(store, killable, reconcile(wanted, offers, leases), now)
        except Killed:
            kills += 1
        except TransientError:
            pass  # the list could not be had: the next round
        store.left = None
    line.bad = False
    server.faults.clear()
    server.capacity.clear()
    for _ in range(QUIET_ROUNDS):
        now += timedelta(seconds=200)
        leases = settle(memory, line, now)
        apply_actions(memory, line, reconcile(wanted, offers, leases), now)
    _compare(findings, memory, fleet, wanted, now)
    return Outcome(dict(+findings.counts), store.boundaries, kills)


def _trouble(rng: random.Random, server: AwsServer, fleet: AwsFleet, now: datetime) -> None:
    """Of one round."""
    server.faults.clear()
    server.capacity.clear()
    alive = [one for one in fleet.instances(now) if one.state.lives]
    if alive and rng.random() < 0.3:
        _by_hand(rng, fleet, rng.choice(alive).id)
    if rng.random() < 0.3:
        action = rng.choice(["RunInstances", "TerminateInstances"])
        server.fail(action, THROTTLED, status=503, times=rng.randrange(1, 4))
    for key, zones in fleet.zones.items():
        for zone in zones:
            if rng.random() < 0.2:
                server.capacity[
                    key[1], zone_names(server, region_of(key[0], "the chaos"))[zone]
                ] = 0


def _by_hand(rng: random.Random, fleet: AwsFleet, instance_id: str) -> None:
    """A user ends an instance, or stops it."""
    for name in fleet.regions:
        ec2 = boto3.client("ec2", region_name=name)
        wanted = [{"Name": "instance-id", "Values": [instance_id]}]
        if ec2.describe_instances(Filters=wanted)["Reservations"]:
            end = ec2.terminate_instances if rng.random() < 0.5 else ec2.stop_instances
            end(InstanceIds=[instance_id])


def _compare(
    findings: Findings, memory: MemoryStore, fleet: AwsFleet, wanted: Mapping[LeaseKey, int],
    now: datetime,
) -> None:  # fmt: skip
    if held_nodes(memory.all()) != Counter({k: n for k, n in wanted.items() if n}):
        findings.add("unconverged")
    held = {lease.id: lease for lease in memory.all() if lease.state.is_held}
    alive = Counter(one.lease_id for one in fleet.instances(now) if one.state.lives)
    findings.counts["leaked"] += sum(n for name, n in alive.items() if name not in held)
    findings.counts["double"] += sum(n > 1 for name, n in alive.items() if name in held)
    findings.counts["lost"] += sum(name not in alive for name in held)

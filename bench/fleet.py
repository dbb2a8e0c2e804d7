"""The fleet under chaos, and how long a round of many nodes takes its controller.

    python -m bench.fleet --json

`schedules` runs of rounds against a simulated cloud with faults (bench/chaos.py), kills between any
two steps included; `aws` is the same of the AWS fleet over HTTP (bench/chaos_aws.py); `real_kills`
processes get SIGKILL at random moments (bench/fleet_kills.py): three of five move a simulated
fleet, the others are agents and controllers of a local one; then all comes to rest and is compared.
`caught` are controllers with one mistake each (bench/chaos_bugs.py) that the same chaos finds.
`round_s` are seconds of a controller that brings up so many nodes from nothing, looks at them when
nothing is to be done, and ends them all, with leases in SQLite and a cloud that answers at once;
`far_away_s` are those of launching and ending them where a call takes 0.2 s and 16 are made side by
side; `aws_round_s` are those of the AWS fleet in two regions against a local AWS in a process of
its own, whose processor time is told apart from the controller's (bench/fleet_rounds.py).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.chaos import offer, run_schedule
from bench.chaos_bugs import BUGS
from bench.fleet_kills import kill_agents, kill_rounds
from bench.fleet_rounds import far_away, rounds_at_aws, rounds_of
from planner.types import Market

MISTAKES = ("leaked", "double", "lost", "unconverged", "unwritten", "unconfirmed", "overspent",
            "surplus")  # fmt: skip
BUG_SCHEDULES = 400
AT_ONCE = 16  # calls, as the AWS fleet makes them


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


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--aws-schedules", type=int, default=40)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started = datetime.now(UTC)
    total: Counter[str] = Counter()
    boundaries = kills = 0
    for seed in range(options.schedules):
        outcome = run_schedule(seed)
        total.update(outcome.found)
        boundaries, kills = boundaries + outcome.boundaries, kills + outcome.kills
    of_agents = options.kills * 2 // 5
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        folder = Path(first)
        rounds = kill_rounds(options.kills - of_agents, folder)
        agents = kill_agents(of_agents, Path(second))
        times = rounds_of(options.nodes, folder)
        far = far_away(options.nodes, AT_ONCE, folder)
        at_aws = rounds_at_aws(options.nodes, folder)
    aws = over_http(options.aws_schedules)
    found = {name: caught(name) for name in BUGS}
    result: dict[str, Any] = {
        "schedules": options.schedules,
        **{name: total[name] for name in MISTAKES},
        "crash_points": boundaries,
        "kills": kills,
        "aws": aws,
        "real_kills": rounds["kills"] + agents["kills"],
        "after_real_kills": {"rounds": rounds, "agents": agents},
        "bugs": len(found),
        "caught": sum(found.values()),
        "uncaught": [name for name, seen in found.items() if not seen],
        "nodes": options.nodes,
        "round_s": times,
        "far_away_s": far,
        "aws_round_s": at_aws,
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 1),
    }
    if options.json:
        print(json.dumps(result))
        return
    print("\n".join(f"{name}: {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()

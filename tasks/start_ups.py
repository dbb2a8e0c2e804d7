"""How long nodes take to come up, as measured: what it costs the plan to begin with new ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from executor.home import HomeFiles
from executor.lease_store import SqliteLeaseStore
from executor.nodes_file import StartUp, read_nodes
from planner.scenario import ScenarioSpec

FEWEST, LATEST = 3, 30  # start-ups that a figure is the median of
PARTS = ("boot", "install", "weights", "engine")


def keep_start_ups(home: Path, store: SqliteLeaseStore) -> None:
    """Take in what the controller measured since the last round."""
    nodes = read_nodes(HomeFiles(home).nodes).nodes
    if nodes:
        found = [
            nodes[lease.id].start_up(lease)
            for lease in store.all()
            if lease.id in nodes and lease.instance_id == nodes[lease.id].instance_id
        ]
        store.save_start_ups([one for one in found if one is not None])


def with_measured_start_up(home: Path, spec: ScenarioSpec) -> ScenarioSpec:
    """A scenario whose new nodes take as long as those of its cloud lately did.

    In whole minutes, so that a second more is no other plan. As it was where few came up yet.
    """
    path = HomeFiles(home).leases
    if not spec.fleet.is_aws or spec.fleet.start_up == "given" or not path.exists():
        return spec
    mine = [one for one in SqliteLeaseStore(path).start_ups() if one.domain in spec.domains]
    if len(mine) < FEWEST:
        return spec
    minutes = max(1, math.ceil(median(one.total_s for one in mine[-LATEST:]) / 60.0))
    allocation = spec.allocation.model_copy(update={"startup_minutes": float(minutes)})
    return spec.model_copy(update={"allocation": allocation})


def median_parts(found: Sequence[StartUp]) -> tuple[float, ...]:
    """Seconds of every part, and of all together."""
    parts = [median(getattr(one, f"{part}_s") for one in found) for part in PARTS]
    return (*(round(part, 1) for part in parts), round(median(x.total_s for x in found), 1))

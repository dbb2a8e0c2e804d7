"""A home in which everything happened once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from catalog.store import Catalog
from executor.lease_store import SqliteLeaseStore
from planner.leases import Lease, LeaseState
from planner.types import Market
from tasks.allocation import decide
from tasks.inputs import load_inputs
from tasks.lease_copy import copy_leases
from tasks.library import build_phase, share_templates
from tasks.scenario_file import read_scenario
from tasks.solving import Solvers

BEGAN = datetime(2026, 3, 1, 22, tzinfo=UTC)


def planned_catalog(home: Path) -> Catalog:
    """Tiny's library and a plan, and a fleet that had one node over midnight."""
    catalog = Catalog(home)
    inputs = load_inputs(catalog, read_scenario("tiny"))
    with Solvers(workers=0) as solvers:
        for phase in inputs.phases:
            build_phase(catalog, phase, solvers)
    share_templates(catalog, inputs.phases)
    decide(catalog, inputs)
    store = SqliteLeaseStore(catalog.home / "leases.sqlite")
    lease = Lease(
        "one", "aws:us-east-1", "g6e.xlarge", "L40S x1", Market.SPOT, 2.0, LeaseState.PLANNED,
        BEGAN, scenario="tiny",
    )  # fmt: skip
    store.save(lease, BEGAN)
    lease = lease.to(LeaseState.LAUNCHING, "").to(LeaseState.RUNNING, "", instance_id="i-1")
    store.save(lease, BEGAN)
    assert len(copy_leases(catalog)) == 2
    ended = BEGAN + timedelta(hours=5)
    store.save(
        lease.to(LeaseState.TERMINATING, "").to(LeaseState.TERMINATED, "", ended_at=ended), ended
    )
    assert len(copy_leases(catalog)) == 1
    assert copy_leases(catalog) == []
    catalog.publish(force=True)
    return catalog

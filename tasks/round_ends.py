"""What a round of operation begins with and what it leaves behind."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime

from catalog.reads import read_decisions_in_force
from catalog.store import Catalog
from planner.scenario import ScenarioSpec
from tasks.coral_task import coral_task
from tasks.corrections import Learned, learn
from tasks.inputs import Inputs, load_inputs
from tasks.lease_copy import LeaseEvent, copy_leases
from tasks.market.launches import remember_launches
from tasks.observed import InboxRead, load_inbox


@dataclass(frozen=True)
class Look:
    """All that a round plans with."""

    inputs: Inputs
    demand: InboxRead
    learned: Learned


def look(catalog: Catalog, spec: ScenarioSpec, now: datetime, draft: bool = False) -> Look:
    """Take in what launches, gateways and replicas said, and read the scenario's inputs."""
    remember_launches(catalog)
    demand = load_inbox(catalog, now)
    inputs = load_inputs(catalog, spec, now)
    learned = learn(catalog, inputs, now, record=not draft)
    inputs = replace(inputs, corrections=learned.factors, notes=learned.notes)
    return Look(inputs, demand, learned)


def close(catalog: Catalog) -> list[LeaseEvent]:
    """What became of nodes goes into the catalog, and the catalog to its readers."""
    events = copy_leases(catalog)
    catalog.publish(force=True)
    return events


def remove_reports(catalog: Catalog, before: datetime) -> int:
    """Pages of decisions written before then, but for decisions in force; how many went."""
    old = [
        page
        for page in (catalog.home / "reports").glob("*.html")
        if re.fullmatch(r"[0-9a-f]{32}", page.stem) and page.stat().st_mtime < before.timestamp()
    ]
    if not old:
        return 0
    with catalog.read() as connection:
        kept = read_decisions_in_force(connection)
    gone = [page for page in old if page.stem not in kept]
    for page in gone:
        page.unlink(missing_ok=True)
    return len(gone)


look_task = coral_task("look", look)
close_task = coral_task("close", close)
remove_reports_task = coral_task("remove-reports", remove_reports)

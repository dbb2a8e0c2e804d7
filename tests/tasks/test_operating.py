"""Operation in rounds: stable when nothing changes, moved by what pays when something does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from catalog.store import Catalog
from executor.home import HomeFiles
from executor.notices_file import NodeNotice, Notices, write_notices
from planner.errors import SolverStoppedError
from planner.leases import LeaseState, held_nodes
from planner.types import Market
from tasks.allocation import decide
from tasks.inputs import load_inputs
from tasks.operating import (
    FleetBusyError,
    FleetChangedError,
    fleet_lock,
    fleet_of,
    lease_store,
    operate_once,
)
from tasks.round_ends import remove_reports
from tasks.scenario_file import read_scenario
from tasks.watching import LOST, NOTICED, OVER, cause_of, wait_for_cause
from tests.support.rounds import NAME, NOW, fleet, reprice, run, spec


def test_a_second_round_with_nothing_changed_changes_nothing(tiny: Catalog) -> None:
    first = run(tiny)
    assert first.applied.launched == first.nodes > 0
    before = lease_store(tiny).all()
    second = run(tiny, minutes=10)
    assert second.decision is None
    assert second.applied.nothing
    assert second.why == "nothing changed"
    assert second.cost_usd_per_hour == pytest.approx(first.cost_usd_per_hour)
    assert [one.id for one in lease_store(tiny).all()] == [one.id for one in before]


def test_reports_go_once_they_are_old_but_not_those_of_plans_in_force(tiny: Catalog) -> None:
    decisions = [run(tiny, spec(demand_scale=scale)).decision for scale in (1.0, 1.5)]
    unapplied = decide(tiny, load_inputs(tiny, spec(demand_scale=0.5), NOW))
    first, second, third = (one.report for one in (*decisions, unapplied))
    other = first.with_name("simulation-1234.html")
    other.write_text("not of a plan")
    now = datetime.now(UTC)
    assert remove_reports(tiny, now - timedelta(days=30.0)) == 0
    written = (now - timedelta(days=31)).timestamp()
    for page in (first, second, third, other):
        os.utime(page, (written, written))
    assert remove_reports(tiny, now - timedelta(days=30.0)) == 1
    assert not first.exists()
    assert second.exists() and third.exists() and other.exists()


def test_held_nodes_cost_no_start_up(tiny: Catalog) -> None:
    first = run(tiny)
    assert first.decision is not None
    more = spec(demand_scale=1.001)
    second = run(tiny, more, minutes=10)
    assert second.decision is not None
    assert second.applied.nothing
    rent = second.decision.coral.cost_usd_per_hour
    assert second.decision.coral.objective_usd == pytest.approx(rent)
    assert first.decision.coral.objective_usd == pytest.approx(rent * (1 + 10 / 60))


def test_more_demand_adds_only_what_is_missing(tiny: Catalog) -> None:
    run(tiny)
    before = {one.id for one in lease_store(tiny).all()}
    grown = run(tiny, spec(demand_scale=1.6), minutes=10)
    assert grown.applied.launched > 0
    kept = {one.id for one in lease_store(tiny).all() if one.state.is_held}
    assert grown.applied.terminated == len(before - kept)
    assert sum(fleet(tiny).values()) == grown.nodes


def test_a_doubled_price_changes_only_what_pays(tiny: Catalog) -> None:
    run(tiny, spec(demand_scale=1.6))
    before = fleet(tiny)
    dearest = max(before, key=lambda key: before[key])
    reprice(tiny, {dearest[1]: 2.0})
    after = run(tiny, spec(demand_scale=1.6), minutes=10)
    assert after.decision is not None
    plan = after.decision.coral
    now = fleet(tiny)
    moved = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    if moved:
        assert "saves" in after.why
        assert now.get(dearest, 0) < before[dearest]  # the dearer nodes went, not others
        kept_cost = sum(
            2 * one.price_usd_per_hour if one.key == dearest else one.price_usd_per_hour
            for one in lease_store(tiny).all()
            if one.created_at == NOW
        )
        assert plan.objective_usd < kept_cost
    reprice(tiny, {dearest[1]: 1.0001}, minutes=2)
    still = run(tiny, spec(demand_scale=1.6), minutes=20)
    assert still.applied.nothing  # a price that hardly moves moves nothing
    assert still.why == "no other plan saves enough to move"


def test_a_lost_node_is_replaced(tiny: Catalog) -> None:
    run(tiny)
    store = lease_store(tiny)
    lost = store.all()[0]
    store.save(lost.to(LeaseState.TERMINATED, "lost", ended_at=NOW), NOW)
    after = run(tiny, minutes=10)
    assert after.decision is None
    assert after.why == "nothing changed but the fleet, which goes back to its plan"
    assert after.applied.launched >= 1
    assert sum(fleet(tiny).values()) == after.nodes


def test_a_fleet_that_the_market_no_longer_offers_goes_on(tiny: Catalog) -> None:
    run(tiny)
    before = fleet(tiny)
    with tiny.write() as connection:  # a pull without the types that run
        connection.execute(
            "INSERT INTO offer BY NAME "
            "SELECT * REPLACE (observed_at + to_minutes(1) AS observed_at) FROM offer "
            "WHERE instance_type NOT IN (SELECT unnest(?::TEXT[]))",
            [sorted({kind for _, kind, _ in before})],
        )
    after = run(tiny, minutes=10)
    assert after.applied.nothing
    assert after.why == "no other plan saves enough to move"
    assert fleet(tiny) == before


def test_without_a_plan_before_the_deadline_the_last_one_stays_loudly(
    tiny: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise SolverStoppedError("allocation: no plan before the deadline; raise deadline_s")

    monkeypatch.setattr("planner.replan.plan_homo_joint", stop)
    with pytest.raises(SolverStoppedError):
        run(tiny)
    monkeypatch.undo()
    run(tiny)
    before = fleet(tiny)
    monkeypatch.setattr("planner.replan.plan_homo_joint", stop)
    after = run(tiny, spec(demand_scale=3.0), minutes=10)
    assert after.stopped
    assert "no plan before the deadline; raise deadline_s; the last plan stays" in after.why
    assert after.decision is None
    assert fleet(tiny) == before


def test_replicas_keep_their_names_and_nodes(tiny: Catalog) -> None:
    first = run(tiny)
    store, name = lease_store(tiny), spec().name
    assert first.replicas.started
    assert all(one.replica for one in store.all())
    before = {one.id: one.replica for one in store.all()}
    run(tiny, spec(demand_scale=1.6), minutes=10)
    kept = {r.id for r in store.replicas(name)} & set(before.values())
    for one in store.all():
        if before.get(one.id) in kept:
            assert one.replica == before[one.id]
    assert kept
    again = run(tiny, spec(demand_scale=1.6), minutes=20)
    assert not again.replicas.started
    assert not again.replicas.ended


def test_another_scenario_of_the_same_home_keeps_its_own_nodes(tiny: Catalog) -> None:
    run(tiny)
    mine = [one.id for one in lease_store(tiny).all()]
    other = run(tiny, spec(name="other"), minutes=10)
    assert other.applied.launched == other.nodes > 0
    assert other.applied.terminated == 0
    assert run(tiny, minutes=20).applied.nothing
    assert {one.id for one in lease_store(tiny).all()} > set(mine)


def test_an_allocation_that_was_not_applied_does_not_confuse_the_fleet(tiny: Catalog) -> None:
    run(tiny)
    decide(tiny, load_inputs(tiny, spec(demand_scale=3.0)))
    assert run(tiny, minutes=10).applied.nothing


def test_one_round_at_a_time(tiny: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.operating.LOCK_PATIENCE_S", 0.1)
    with fleet_lock(tiny), pytest.raises(FleetBusyError, match="is moving the fleet of"):
        run(tiny)


def test_equal_inputs_have_equal_fingerprints_in_every_process(tiny: Catalog) -> None:
    code = (
        "from dataclasses import replace\n"
        "from planner.allocation.options import ServiceRules\n"
        "from tasks.allocation import fingerprint\n"
        "from tests.planner.test_allocation_options import two_domains\n"
        "rules = {'chat': ServiceRules(domains=frozenset({'d1', 'd2', 'd3', 'd4'}))}\n"
        "print(fingerprint(two_domains(rules=rules)))\n"
    )
    marks = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(marks) == 1


def test_a_reader_of_the_snapshot_meets_no_lock_during_many_rounds(tiny: Catalog) -> None:
    tiny.publish(force=True)
    stop, errors, seen = threading.Event(), [], []

    def read() -> None:
        while not stop.is_set():
            try:
                _, rows = tiny.query(
                    "SELECT count(DISTINCT a.decision_id), count(*), "
                    "count(*) FILTER (WHERE s.allocation_id IS NULL) FROM allocation a "
                    "LEFT JOIN (SELECT DISTINCT allocation_id FROM allocation_service) s "
                    "USING (allocation_id)"
                )
                seen.append(rows[0])
            except Exception as error:
                errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(10):
        run(tiny, spec(demand_scale=1.0 + 0.01 * (number % 4)), minutes=number)
        tiny.publish(force=True)
    stop.set()
    reader.join()
    assert errors == []
    assert len(seen) > 10
    assert all(plans == 2 * decisions for decisions, plans, _ in seen)  # both plans or none
    assert all(without_services == 0 for *_, without_services in seen)
    assert [row[0] for row in seen] == sorted(row[0] for row in seen)


def test_a_draft_says_what_it_would_do_and_does_nothing(tiny: Catalog) -> None:
    inputs = load_inputs(tiny, spec())
    draft = operate_once(tiny, spec(), inputs, NOW, draft=True)
    assert draft.calls and all(call.startswith("launch ") for call in draft.calls)
    assert lease_store(tiny).all() == []
    assert lease_store(tiny).replicas() == []
    done = run(tiny)
    assert done.calls is None
    assert done.applied.launched == len(draft.calls)
    moved = spec(demand_scale=0.3)
    less = operate_once(tiny, moved, load_inputs(tiny, moved), NOW, draft=True)
    assert less.calls and any(call.startswith("terminate sim-") for call in less.calls)
    assert fleet(tiny) == dict(held_nodes(lease_store(tiny).all()))
    assert run(tiny, minutes=10).why == "nothing changed"  # a draft is no plan that is followed


def test_a_scenario_does_not_leave_its_nodes_on_another_fleet(tiny: Catalog) -> None:
    run(tiny)
    store = lease_store(tiny)
    for lease in store.all():
        store.save(replace(lease, fleet="elsewhere"), NOW)
    with pytest.raises(FleetChangedError, match=r"run on a elsewhere fleet .* `coral down`"):
        run(tiny, minutes=10)


def test_a_node_that_is_about_to_be_taken_drains_and_is_replaced(tiny: Catalog) -> None:
    run(tiny)
    run(tiny, minutes=20)  # all are ready
    store = lease_store(tiny)
    victim = next(lease for lease in store.all() if lease.state is LeaseState.READY)
    taken_at = NOW + timedelta(minutes=32)
    notice = Notices(nodes={victim.id: NodeNotice(kind="spot", at=taken_at)})
    write_notices(HomeFiles(tiny.home).notices, notice)
    assert cause_of(tiny, store, fleet_of(tiny.home, spec()), NOW, NAME) == NOTICED
    assert cause_of(tiny, store, fleet_of(tiny.home, spec()), NOW, "other") == ""
    after = run(tiny, minutes=30)
    assert after.applied.launched == 1
    states = {lease.id: lease for lease in store.all()}
    assert states[victim.id].state is LeaseState.DRAINING
    assert "its cloud takes it at" in states[victim.id].reason
    assert cause_of(tiny, store, fleet_of(tiny.home, spec()), NOW, NAME) == ""
    run(tiny, minutes=33)
    assert {lease.id: lease.state for lease in store.all()}[victim.id] is LeaseState.TERMINATED


def test_a_lost_node_begins_a_round_at_once(tiny: Catalog) -> None:
    run(tiny)
    now = NOW + timedelta(minutes=20)
    run(tiny, minutes=20)
    store, cloud = lease_store(tiny), fleet_of(tiny.home, spec())
    assert cause_of(tiny, store, cloud, now, NAME) == ""
    cloud.terminate(store.all()[0].instance_id or "")
    assert cause_of(tiny, store, cloud, now, NAME) == LOST
    waits: list[float] = []
    why = wait_for_cause(tiny, spec(), 600.0, sleep=waits.append)
    assert (why, waits) == (LOST, [15.0])
    assert wait_for_cause(tiny, spec(name="other"), 0.0) == OVER


def test_preempted_spot_nodes_are_replaced_round_by_round(tiny: Catalog) -> None:
    taken = read_scenario("tiny").fleet.model_copy(update={"preemptions_per_hour": 3.0})
    risky = spec(fleet=taken, markets=(Market.SPOT, Market.ON_DEMAND))
    for minutes in range(0, 120, 10):
        found = run(tiny, risky, minutes=minutes)
        if found.decision is not None:
            planned = sum(one.count for one in found.decision.coral.nodes)
        assert found.nodes == planned > 0
    gone = [x for x in lease_store(tiny).all() if x.reason == "its node is gone"]
    assert gone and all(lease.market is Market.SPOT for lease in gone)


def test_a_clock_that_was_set_back_does_not_bring_an_older_plan_back(tiny: Catalog) -> None:
    half = spec(demand_scale=0.5)
    run(tiny)
    assert run(tiny, half, minutes=10).decision is not None
    again = run(tiny, spec(), minutes=-60)  # the plan made last has the earliest time
    assert again.decision is not None
    assert run(tiny, spec(), minutes=-50).why == "nothing changed"
    assert fleet(tiny) == dict(again.decision.coral.node_counts)

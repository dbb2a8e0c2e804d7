"""Operation in rounds: stable when nothing changes, moved by what pays when something does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from catalog.store import Catalog
from executor.home import HomeFiles
from executor.notices_file import NodeNotice, Notices, write_notices
from planner.errors import SolverStoppedError
from planner.leases import LeaseState, held_nodes
from planner.scenario import ScenarioSpec
from planner.succession import WAITS
from planner.types import Market
from tasks.allocation import decide
from tasks.fleet_view import end_fleet
from tasks.inputs import load_inputs
from tasks.operating import (
    FleetBusyError,
    FleetChangedError,
    Round,
    fleet_lock,
    fleet_of,
    lease_store,
    operate_once,
)
from tasks.scenario_file import read_scenario
from tasks.watching import LOST, NOTICED, OVER, cause_of, wait_for_cause
from tests.support.library import catalog_with

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


NAME = "tiny"  # of the scenario


def spec(**changes) -> ScenarioSpec:
    """tiny with some of everything to rent."""
    base = read_scenario("tiny")
    stock = base.stock.model_copy(update={"factor": 1.0})
    return base.model_copy(update={"stock": stock, **changes})


@pytest.fixture
def catalog(tiny_library: Path, tmp_path: Path) -> Catalog:
    return catalog_with(tiny_library, tmp_path)


def run(catalog: Catalog, scenario: ScenarioSpec | None = None, minutes: int = 0) -> Round:
    chosen = scenario or spec()
    now = NOW + timedelta(minutes=minutes)
    return operate_once(catalog, chosen, load_inputs(catalog, chosen), now)


def fleet(catalog: Catalog) -> dict:
    return dict(held_nodes(lease_store(catalog).all()))


def reprice(catalog: Catalog, factor_by_type: dict[str, float], minutes: int = 1) -> None:
    """A newer pull of the whole market, with some prices multiplied."""
    cases = " ".join(f"WHEN '{name}' THEN {factor}" for name, factor in factor_by_type.items())
    with catalog.write() as connection:
        connection.execute(
            "INSERT INTO offer BY NAME SELECT * REPLACE (observed_at + to_minutes(?) AS "
            f"observed_at, price_usd_per_hour * CASE instance_type {cases} ELSE 1 END AS "
            "price_usd_per_hour) FROM offer "
            "WHERE observed_at = (SELECT max(observed_at) FROM offer)",
            [minutes],
        )


def test_a_second_round_with_nothing_changed_changes_nothing(catalog: Catalog) -> None:
    first = run(catalog)
    assert first.applied.launched == first.nodes > 0
    before = lease_store(catalog).all()
    second = run(catalog, minutes=10)
    assert second.decision is None
    assert second.applied.nothing
    assert second.why == "nothing changed"
    assert second.cost_usd_per_hour == pytest.approx(first.cost_usd_per_hour)
    assert [one.id for one in lease_store(catalog).all()] == [one.id for one in before]


def test_held_nodes_cost_no_start_up(catalog: Catalog) -> None:
    first = run(catalog)
    assert first.decision is not None
    more = spec(demand_scale=1.001)
    second = run(catalog, more, minutes=10)
    assert second.decision is not None
    assert second.applied.nothing
    rent = second.decision.coral.cost_usd_per_hour
    assert second.decision.coral.objective_usd == pytest.approx(rent)
    assert first.decision.coral.objective_usd == pytest.approx(rent * (1 + 10 / 60))


def test_more_demand_adds_only_what_is_missing(catalog: Catalog) -> None:
    run(catalog)
    before = {one.id for one in lease_store(catalog).all()}
    grown = run(catalog, spec(demand_scale=1.6), minutes=10)
    assert grown.applied.launched > 0
    kept = {one.id for one in lease_store(catalog).all() if one.state.is_held}
    assert grown.applied.terminated == len(before - kept)
    assert sum(fleet(catalog).values()) == grown.nodes


def test_a_doubled_price_changes_only_what_pays(catalog: Catalog) -> None:
    run(catalog, spec(demand_scale=1.6))
    before = fleet(catalog)
    dearest = max(before, key=lambda key: before[key])
    reprice(catalog, {dearest[1]: 2.0})
    after = run(catalog, spec(demand_scale=1.6), minutes=10)
    assert after.decision is not None
    plan = after.decision.coral
    now = fleet(catalog)
    moved = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    if moved:
        assert "saves" in after.why
        assert now.get(dearest, 0) < before[dearest]  # the dearer nodes went, not others
        kept_cost = sum(
            2 * one.price_usd_per_hour if one.key == dearest else one.price_usd_per_hour
            for one in lease_store(catalog).all()
            if one.created_at == NOW
        )
        assert plan.objective_usd < kept_cost
    reprice(catalog, {dearest[1]: 1.0001}, minutes=2)
    still = run(catalog, spec(demand_scale=1.6), minutes=20)
    assert still.applied.nothing  # a price that hardly moves moves nothing
    assert still.why == "no other plan saves enough to move"


def test_a_price_that_pays_for_a_move_moves_the_fleet(catalog: Catalog) -> None:
    run(catalog)
    before = fleet(catalog)
    reprice(catalog, {key[1]: 40.0 for key in before})
    after = run(catalog, minutes=10)
    assert "saves" in after.why
    assert after.applied.launched > 0
    run(catalog, minutes=30)  # what was launched serves by then
    assert fleet(catalog).keys().isdisjoint(before)


def test_what_leaves_serves_until_what_follows_it_does(catalog: Catalog) -> None:
    run(catalog)
    run(catalog, minutes=20)
    before = {lease.id for lease in lease_store(catalog).all()}
    reprice(catalog, {key[1]: 40.0 for key in fleet(catalog)})
    moved = run(catalog, minutes=30)
    new = moved.applied.launched
    assert new > 0 and moved.applied.terminated == 0
    assert moved.waiting == len(moved.replicas.kept) > 0 and not moved.replicas.ended
    assert moved.nodes == len(before) + new
    store = lease_store(catalog)
    assert {x.reason for x in store.all() if x.id in before} == {WAITS}
    still = run(catalog, minutes=32)  # they are not up yet
    assert still.applied.nothing and still.waiting == moved.waiting
    done = run(catalog, minutes=50)
    assert (done.applied.terminated, done.nodes, done.waiting) == (len(before), new, 0)
    assert len(done.replicas.ended) == moved.waiting
    assert not [x for x in store.all() if x.id in before and not x.state.is_over]


def test_where_a_cap_leaves_no_room_what_leaves_makes_it(catalog: Catalog) -> None:
    whole = run(catalog).cost_usd_per_hour
    run(catalog, minutes=20)
    reprice(catalog, {key[1]: 40.0 for key in fleet(catalog)})
    capped = read_scenario("tiny").fleet.model_copy(update={"max_usd_per_hour": 1.01 * whole})
    moved = run(catalog, spec(fleet=capped), minutes=30)
    assert moved.applied.held_back > 0 and moved.waiting == 0
    assert moved.applied.terminated > 0


def test_a_node_that_may_be_taken_serves_until_others_do(catalog: Catalog) -> None:
    nodes = run(catalog).nodes
    run(catalog, minutes=20)
    store = lease_store(catalog)
    shaken = store.all()[0]
    hint = Notices(nodes={shaken.id: NodeNotice(kind="rebalance", at=NOW)})
    write_notices(HomeFiles(catalog.home).notices, hint)
    assert cause_of(catalog, store, fleet_of(catalog.home, spec()), NOW, NAME) == NOTICED
    beside = sum(lease.replica == shaken.replica for lease in store.all())
    found = run(catalog, minutes=30)
    assert (found.applied.launched, found.applied.terminated) == (beside, 0)
    assert (found.waiting, found.nodes) == (1, nodes + beside)
    assert {x.id: x for x in store.all()}[shaken.id].state is LeaseState.READY
    assert cause_of(catalog, store, fleet_of(catalog.home, spec()), NOW, NAME) == ""
    none = read_scenario("tiny").fleet.model_copy(update={"max_nodes_per_domain": 1})
    assert run(catalog, spec(fleet=none), minutes=31).applied.terminated == 0
    done = run(catalog, minutes=50)
    assert (done.applied.terminated, done.nodes) == (beside, nodes)
    assert {x.id: x for x in store.all()}[shaken.id].state is LeaseState.TERMINATED
    assert run(catalog, minutes=51).applied.nothing


def test_a_lost_node_is_replaced(catalog: Catalog) -> None:
    run(catalog)
    store = lease_store(catalog)
    lost = store.all()[0]
    store.save(lost.to(LeaseState.TERMINATED, "lost", ended_at=NOW), NOW)
    after = run(catalog, minutes=10)
    assert after.decision is None
    assert after.why == "nothing changed but the fleet, which goes back to its plan"
    assert after.applied.launched >= 1
    assert sum(fleet(catalog).values()) == after.nodes


def test_launches_that_fail_are_tried_again_in_the_next_round(catalog: Catalog) -> None:
    broken = read_scenario("tiny").fleet.model_copy(update={"failure_rate": 1.0})
    first = run(catalog, spec(fleet=broken))
    assert first.applied.failed > 0
    assert first.nodes == 0
    assert fleet(catalog) == {}
    second = run(catalog, minutes=10)
    assert second.applied.launched == second.nodes == first.applied.failed


def test_nothing_is_terminated_while_its_replacement_fails(catalog: Catalog) -> None:
    run(catalog)
    before = fleet(catalog)
    reprice(catalog, {key[1]: 40.0 for key in before})
    broken = read_scenario("tiny").fleet.model_copy(update={"failure_rate": 1.0})
    after = run(catalog, spec(fleet=broken), minutes=10)
    assert after.applied.failed > 0
    assert after.applied.terminated == 0
    assert fleet(catalog) == before
    assert not after.replicas.ended
    serving = {one.replica for one in lease_store(catalog).all() if one.state.is_held}
    assert serving <= {replica.id for replica in lease_store(catalog).replicas()}


def test_a_fleet_that_the_market_no_longer_offers_goes_on(catalog: Catalog) -> None:
    run(catalog)
    before = fleet(catalog)
    with catalog.write() as connection:  # a pull without the types that run
        connection.execute(
            "INSERT INTO offer BY NAME "
            "SELECT * REPLACE (observed_at + to_minutes(1) AS observed_at) FROM offer "
            "WHERE instance_type NOT IN (SELECT unnest(?::TEXT[]))",
            [sorted({kind for _, kind, _ in before})],
        )
    after = run(catalog, minutes=10)
    assert after.applied.nothing
    assert after.why == "no other plan saves enough to move"
    assert fleet(catalog) == before


def test_without_a_plan_before_the_deadline_the_last_one_stays_loudly(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise SolverStoppedError("allocation: no plan before the deadline; raise deadline_s")

    monkeypatch.setattr("planner.replan.plan_homo_joint", stop)
    with pytest.raises(SolverStoppedError):
        run(catalog)
    monkeypatch.undo()
    run(catalog)
    before = fleet(catalog)
    monkeypatch.setattr("planner.replan.plan_homo_joint", stop)
    after = run(catalog, spec(demand_scale=3.0), minutes=10)
    assert after.stopped
    assert "no plan before the deadline; raise deadline_s; the last plan stays" in after.why
    assert after.decision is None
    assert fleet(catalog) == before


def test_replicas_keep_their_names_and_nodes(catalog: Catalog) -> None:
    first = run(catalog)
    store, name = lease_store(catalog), spec().name
    assert first.replicas.started
    assert all(one.replica for one in store.all())
    before = {one.id: one.replica for one in store.all()}
    run(catalog, spec(demand_scale=1.6), minutes=10)
    kept = {r.id for r in store.replicas(name)} & set(before.values())
    for one in store.all():
        if before.get(one.id) in kept:
            assert one.replica == before[one.id]
    assert kept
    again = run(catalog, spec(demand_scale=1.6), minutes=20)
    assert not again.replicas.started
    assert not again.replicas.ended


def test_another_scenario_of_the_same_home_keeps_its_own_nodes(catalog: Catalog) -> None:
    run(catalog)
    mine = [one.id for one in lease_store(catalog).all()]
    other = run(catalog, spec(name="other"), minutes=10)
    assert other.applied.launched == other.nodes > 0
    assert other.applied.terminated == 0
    assert run(catalog, minutes=20).applied.nothing
    assert {one.id for one in lease_store(catalog).all()} > set(mine)


def test_an_allocation_that_was_not_applied_does_not_confuse_the_fleet(catalog: Catalog) -> None:
    run(catalog)
    decide(catalog, load_inputs(catalog, spec(demand_scale=3.0)))
    assert run(catalog, minutes=10).applied.nothing


def test_one_round_at_a_time(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.operating.LOCK_PATIENCE_S", 0.1)
    with fleet_lock(catalog), pytest.raises(FleetBusyError, match="is moving the fleet of"):
        run(catalog)


def test_equal_inputs_have_equal_fingerprints_in_every_process(catalog: Catalog) -> None:
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


def test_a_reader_of_the_snapshot_meets_no_lock_during_many_rounds(catalog: Catalog) -> None:
    catalog.publish(force=True)
    stop, errors, seen = threading.Event(), [], []

    def read() -> None:
        while not stop.is_set():
            try:
                _, rows = catalog.query(
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
        run(catalog, spec(demand_scale=1.0 + 0.01 * (number % 4)), minutes=number)
        catalog.publish(force=True)
    stop.set()
    reader.join()
    assert errors == []
    assert len(seen) > 10
    assert all(plans == 2 * decisions for decisions, plans, _ in seen)  # both plans or none
    assert all(without_services == 0 for *_, without_services in seen)
    assert [row[0] for row in seen] == sorted(row[0] for row in seen)


def test_a_draft_says_what_it_would_do_and_does_nothing(catalog: Catalog) -> None:
    inputs = load_inputs(catalog, spec())
    draft = operate_once(catalog, spec(), inputs, NOW, draft=True)
    assert draft.calls and all(call.startswith("launch ") for call in draft.calls)
    assert lease_store(catalog).all() == []
    assert lease_store(catalog).replicas() == []
    done = run(catalog)
    assert done.calls is None
    assert done.applied.launched == len(draft.calls)
    moved = spec(demand_scale=0.3)
    less = operate_once(catalog, moved, load_inputs(catalog, moved), NOW, draft=True)
    assert less.calls and any(call.startswith("terminate sim-") for call in less.calls)
    assert fleet(catalog) == dict(held_nodes(lease_store(catalog).all()))
    assert run(catalog, minutes=10).why == "nothing changed"  # a draft is no plan that is followed


def test_a_cap_on_spend_is_never_passed(catalog: Catalog) -> None:
    whole = run(catalog).cost_usd_per_hour
    end_fleet(str(catalog.home))
    capped = read_scenario("tiny").fleet.model_copy(update={"max_usd_per_hour": 0.6 * whole})
    less = run(catalog, spec(fleet=capped), minutes=10)
    assert less.applied.held_back > 0
    assert less.cost_usd_per_hour <= 0.6 * whole
    assert any("is over the cap of" in reason for reason in less.applied.why)


def test_a_scenario_does_not_leave_its_nodes_on_another_fleet(catalog: Catalog) -> None:
    run(catalog)
    store = lease_store(catalog)
    for lease in store.all():
        store.save(replace(lease, fleet="elsewhere"), NOW)
    with pytest.raises(FleetChangedError, match=r"run on a elsewhere fleet .* `coral down`"):
        run(catalog, minutes=10)


def test_a_replica_that_does_not_come_together_is_given_back(catalog: Catalog) -> None:
    """Nodes that never come up are pending for ever: the replica ends, others are planned."""
    slow = read_scenario("tiny").fleet.model_copy(update={"startup_minutes": 10_000.0})
    waiting = spec(fleet=slow)
    first = run(catalog, waiting)
    started = {replica.id for replica in first.replicas.started}
    run(catalog, waiting, minutes=10)
    assert {r.id for r in lease_store(catalog).replicas()} == started
    late = run(catalog, waiting, minutes=29)
    assert not late.replicas.ended
    run(catalog, waiting, minutes=31)
    left = {r.id for r in lease_store(catalog).replicas()}
    assert left.isdisjoint(started)


def test_a_node_that_is_about_to_be_taken_drains_and_is_replaced(catalog: Catalog) -> None:
    run(catalog)
    run(catalog, minutes=20)  # all are ready
    store = lease_store(catalog)
    victim = next(lease for lease in store.all() if lease.state is LeaseState.READY)
    taken_at = NOW + timedelta(minutes=32)
    notice = Notices(nodes={victim.id: NodeNotice(kind="spot", at=taken_at)})
    write_notices(HomeFiles(catalog.home).notices, notice)
    assert cause_of(catalog, store, fleet_of(catalog.home, spec()), NOW, NAME) == NOTICED
    assert cause_of(catalog, store, fleet_of(catalog.home, spec()), NOW, "other") == ""
    after = run(catalog, minutes=30)
    assert after.applied.launched == 1
    states = {lease.id: lease for lease in store.all()}
    assert states[victim.id].state is LeaseState.DRAINING
    assert "its cloud takes it at" in states[victim.id].reason
    assert cause_of(catalog, store, fleet_of(catalog.home, spec()), NOW, NAME) == ""
    run(catalog, minutes=33)
    assert {lease.id: lease.state for lease in store.all()}[victim.id] is LeaseState.TERMINATED


def test_a_lost_node_begins_a_round_at_once(catalog: Catalog) -> None:
    run(catalog)
    now = NOW + timedelta(minutes=20)
    run(catalog, minutes=20)
    store, cloud = lease_store(catalog), fleet_of(catalog.home, spec())
    assert cause_of(catalog, store, cloud, now, NAME) == ""
    cloud.terminate(store.all()[0].instance_id or "")
    assert cause_of(catalog, store, cloud, now, NAME) == LOST
    waits: list[float] = []
    why = wait_for_cause(catalog, spec(), 600.0, sleep=waits.append)
    assert (why, waits) == (LOST, [15.0])
    assert wait_for_cause(catalog, spec(name="other"), 0.0) == OVER


def test_preempted_spot_nodes_are_replaced_round_by_round(catalog: Catalog) -> None:
    taken = read_scenario("tiny").fleet.model_copy(update={"preemptions_per_hour": 3.0})
    risky = spec(fleet=taken, markets=(Market.SPOT, Market.ON_DEMAND))
    nodes = run(catalog, risky).nodes
    for minutes in range(10, 120, 10):
        found = run(catalog, risky, minutes=minutes)
        assert found.nodes == nodes
    gone = [x for x in lease_store(catalog).all() if x.reason == "its node is gone"]
    assert gone and all(lease.market is Market.SPOT for lease in gone)

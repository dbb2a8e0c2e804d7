"""How a round moves a fleet: what is launched instead, what stays, what leaves first."""

from __future__ import annotations

from datetime import datetime

import pytest

from catalog.store import Catalog
from coral.render import print_round, round_summary
from executor.fleet import Launched, NoCapacityError
from executor.home import HomeFiles
from executor.notices_file import NodeNotice, Notices, write_notices
from executor.simulated import SimulatedFleet
from planner.errors import SolverStoppedError
from planner.leases import Lease, LeaseState
from planner.succession import WAITS
from tasks.fleet_view import end_fleet
from tasks.inputs import load_inputs
from tasks.operating import (
    fleet_of,
    lease_store,
    operate_once,
)
from tasks.scenario_file import read_scenario
from tasks.turn import UnmakeablePlanError
from tasks.watching import NOTICED, cause_of
from tests.support.rounds import NAME, NOW, fleet, reprice, run, spec


def test_a_price_that_pays_for_a_move_moves_the_fleet(tiny: Catalog) -> None:
    run(tiny)
    before = fleet(tiny)
    reprice(tiny, {key[1]: 40.0 for key in before})
    after = run(tiny, minutes=10)
    assert "saves" in after.why
    assert after.applied.launched > 0
    run(tiny, minutes=30)  # what was launched serves by then
    assert fleet(tiny).keys().isdisjoint(before)


def test_what_leaves_serves_until_what_follows_it_does(tiny: Catalog) -> None:
    run(tiny)
    run(tiny, minutes=20)
    before = {lease.id for lease in lease_store(tiny).all()}
    reprice(tiny, {key[1]: 40.0 for key in fleet(tiny)})
    moved = run(tiny, minutes=30)
    new = moved.applied.launched
    assert new > 0 and moved.applied.terminated == 0
    assert moved.waiting == len(moved.replicas.kept) > 0 and not moved.replicas.ended
    assert moved.nodes == len(before) + new
    store = lease_store(tiny)
    assert {x.reason for x in store.all() if x.id in before} == {WAITS}
    still = run(tiny, minutes=32)  # they are not up yet
    assert still.applied.nothing and still.waiting == moved.waiting
    done = run(tiny, minutes=50)
    assert (done.applied.terminated, done.nodes, done.waiting) == (len(before), new, 0)
    assert len(done.replicas.ended) == moved.waiting
    assert not [x for x in store.all() if x.id in before and not x.state.is_over]


def test_where_a_cap_leaves_no_room_what_leaves_makes_it(tiny: Catalog) -> None:
    whole = run(tiny).cost_usd_per_hour
    run(tiny, minutes=20)
    reprice(tiny, {key[1]: 40.0 for key in fleet(tiny)})
    capped = read_scenario("tiny").fleet.model_copy(update={"max_usd_per_hour": 1.01 * whole})
    moved = run(tiny, spec(fleet=capped), minutes=30)
    assert moved.applied.held_back > 0 and moved.waiting == 0
    assert moved.applied.terminated > 0


def test_where_a_cap_leaves_room_for_some_what_loses_least_makes_it(tiny: Catalog) -> None:
    """Of four small nodes two go, so that the large one in place of all can be paid."""
    large, small = "p5.4xlarge", "g6e.xlarge"
    reprice(tiny, {large: 40.0})
    run(tiny)
    whole = run(tiny, minutes=20).cost_usd_per_hour
    store = lease_store(tiny)
    before = [lease for lease in store.all() if lease.state.is_held]
    assert {lease.instance_type for lease in before} == {small} and len(before) == 4
    reprice(tiny, {large: 1 / 40, small: 40.0}, minutes=1)
    price = before[0].price_usd_per_hour
    peek = operate_once(tiny, spec(), load_inputs(tiny, spec()), NOW, draft=True)
    assert peek.decision is not None and set(peek.decision.coral.node_counts.values()) == {1}
    room = peek.decision.coral.cost_usd_per_hour - 1.5 * price  # two must go, and one would not do
    capped = read_scenario("tiny").fleet.model_copy(update={"max_usd_per_hour": whole + room})
    moved = run(tiny, spec(fleet=capped), minutes=30)
    assert (moved.applied.held_back, moved.applied.terminated, moved.waiting) == (1, 2, 2)
    assert len(moved.replicas.ended) == 2
    (rps,) = moved.short_rps.values()
    again = run(tiny, spec(fleet=capped), minutes=31)  # what left makes room: no more of it goes
    assert (again.applied.launched, again.applied.terminated, again.waiting) == (1, 0, 2)
    assert rps > 0 and again.short_rps == {}
    done = run(tiny, spec(fleet=capped), minutes=50)
    assert (done.waiting, done.nodes, done.short_rps) == (0, 1, {})


def test_what_a_move_cannot_serve_meanwhile_is_said(
    tiny: Catalog, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no money for both, what runs makes room, and until the others serve nothing does."""
    whole = run(tiny).cost_usd_per_hour
    ready = run(tiny, minutes=20)
    assert ready.short_rps == {}
    reprice(tiny, {key[1]: 40.0 for key in fleet(tiny)})
    capped = read_scenario("tiny").fleet.model_copy(update={"max_usd_per_hour": 1.01 * whole})
    moved = run(tiny, spec(fleet=capped), minutes=30)
    ((name, rps),) = moved.short_rps.items()
    (demand,) = {w.demand_rps for w in load_inputs(tiny, spec()).scenario.workloads}
    assert 0 < rps <= demand
    assert round_summary(moved)["short_rps"] == {name: round(rps, 4)}
    print_round(moved)
    assert f"{rps:.2f} requests/s of {name} less can be served until" in capsys.readouterr().out


def test_a_plan_that_no_fleet_can_make_is_refused_before_anything_moves(
    tiny: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The solver finds none in time, and the last plan has nodes that nobody offers any more."""
    run(tiny)
    store = lease_store(tiny)
    kinds = sorted({kind for _, kind, _ in fleet(tiny)})
    with tiny.write() as connection:
        connection.execute(
            "INSERT INTO offer BY NAME "
            "SELECT * REPLACE (observed_at + to_minutes(1) AS observed_at) FROM offer "
            "WHERE instance_type NOT IN (SELECT unnest(?::TEXT[]))",
            [kinds],
        )
    for lease in store.all():
        store.save(lease.to(LeaseState.TERMINATED, "lost", ended_at=NOW), NOW)
    before = store.all()

    def stop(*_: object) -> None:
        raise SolverStoppedError("allocation: no plan before the deadline")

    monkeypatch.setattr("planner.replan.plan_homo_joint", stop)
    with pytest.raises(UnmakeablePlanError, match=f"{kinds[0]} .* can no longer make; raise"):
        run(tiny, minutes=10)
    assert store.all() == before
    monkeypatch.undo()
    assert run(tiny, minutes=11).nodes > 0


def test_a_node_that_may_be_taken_serves_until_others_do(tiny: Catalog) -> None:
    nodes = run(tiny).nodes
    run(tiny, minutes=20)
    store = lease_store(tiny)
    shaken = store.all()[0]
    hint = Notices(nodes={shaken.id: NodeNotice(kind="rebalance", at=NOW)})
    write_notices(HomeFiles(tiny.home).notices, hint)
    assert cause_of(tiny, store, fleet_of(tiny.home, spec()), NOW, NAME) == NOTICED
    beside = sum(lease.replica == shaken.replica for lease in store.all())
    found = run(tiny, minutes=30)
    assert (found.applied.launched, found.applied.terminated) == (beside, 0)
    assert (found.waiting, found.nodes) == (1, nodes + beside)
    assert {x.id: x for x in store.all()}[shaken.id].state is LeaseState.READY
    assert cause_of(tiny, store, fleet_of(tiny.home, spec()), NOW, NAME) == ""
    none = read_scenario("tiny").fleet.model_copy(update={"max_nodes_per_domain": 1})
    assert run(tiny, spec(fleet=none), minutes=31).applied.terminated == 0
    done = run(tiny, minutes=50)
    assert (done.applied.terminated, done.nodes) == (beside, nodes)
    assert {x.id: x for x in store.all()}[shaken.id].state is LeaseState.TERMINATED
    assert run(tiny, minutes=51).applied.nothing


def test_launches_that_fail_are_tried_again_in_the_next_round(tiny: Catalog) -> None:
    broken = {"failure_rate": 1.0, "plans_per_round": 1}
    first = run(tiny, spec(fleet=read_scenario("tiny").fleet.model_copy(update=broken)))
    assert first.applied.failed > 0
    assert first.nodes == 0
    assert fleet(tiny) == {}
    second = run(tiny, minutes=10)
    assert second.applied.launched == second.nodes == first.applied.failed


def lack(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """No capacity for these instance types from now on."""
    launch = SimulatedFleet.launch

    def scarce(self: SimulatedFleet, lease: Lease, now: datetime) -> Launched:
        if lease.instance_type in kinds:
            raise NoCapacityError(f"no capacity for {lease.instance_type}")
        return launch(self, lease, now)

    monkeypatch.setattr(SimulatedFleet, "launch", scarce)


def test_the_next_offer_is_tried_in_the_same_round(
    tiny: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    peek = operate_once(tiny, spec(), load_inputs(tiny, spec()), NOW, draft=True)
    assert peek.decision is not None
    kinds = {key[1] for key in peek.decision.coral.node_counts}
    lack(monkeypatch, *kinds)
    found = run(tiny)
    assert found.applied.failed > 0 and found.decision is not None
    assert found.nodes == found.applied.launched > 0
    assert found.decision.coral.served_share == 1.0
    assert f"planned again, for no capacity was found for {min(kinds)} (on_demand)" in found.why
    assert kinds.isdisjoint(key[1] for key in fleet(tiny))
    held = [lease for lease in lease_store(tiny).all() if lease.state.is_held]
    replicas = {replica.id for replica in lease_store(tiny).replicas()}
    assert {lease.replica for lease in held} == replicas == {r.id for r in found.replicas.started}
    monkeypatch.undo()
    assert run(tiny, minutes=10).applied.failed == 0


def test_nothing_is_terminated_while_its_replacement_fails(tiny: Catalog) -> None:
    run(tiny)
    before = fleet(tiny)
    reprice(tiny, {key[1]: 40.0 for key in before})
    broken = read_scenario("tiny").fleet.model_copy(update={"failure_rate": 1.0})
    after = run(tiny, spec(fleet=broken), minutes=10)
    assert after.applied.failed > 0
    assert after.applied.terminated == 0
    assert fleet(tiny) == before
    assert not after.replicas.ended
    serving = {one.replica for one in lease_store(tiny).all() if one.state.is_held}
    assert serving <= {replica.id for replica in lease_store(tiny).replicas()}


def test_a_cap_on_spend_is_never_passed(tiny: Catalog) -> None:
    whole = run(tiny).cost_usd_per_hour
    end_fleet(str(tiny.home))
    capped = read_scenario("tiny").fleet.model_copy(update={"max_usd_per_hour": 0.6 * whole})
    less = run(tiny, spec(fleet=capped), minutes=10)
    assert less.applied.held_back > 0
    assert less.cost_usd_per_hour <= 0.6 * whole
    assert any("is over the cap of" in reason for reason in less.applied.why)


def test_a_replica_that_does_not_come_together_is_given_back(tiny: Catalog) -> None:
    """Nodes that never come up are pending for ever: the replica ends, others are planned."""
    slow = read_scenario("tiny").fleet.model_copy(update={"startup_minutes": 10_000.0})
    waiting = spec(fleet=slow)
    first = run(tiny, waiting)
    started = {replica.id for replica in first.replicas.started}
    run(tiny, waiting, minutes=10)
    assert {r.id for r in lease_store(tiny).replicas()} == started
    late = run(tiny, waiting, minutes=29)
    assert not late.replicas.ended
    run(tiny, waiting, minutes=31)
    left = {r.id for r in lease_store(tiny).replicas()}
    assert left.isdisjoint(started)

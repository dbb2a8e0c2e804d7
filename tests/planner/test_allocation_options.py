"""Quotas, shares, budget, spread, residency, least served, owned, egress, drains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coral.render import describe_binding, describe_rules
from planner.allocation.check import PlanCheckError, check_plan
from planner.allocation.options import AllocationOptions, Quota, ServiceRules
from planner.allocation.problem import (
    AllocationInput,
)
from planner.allocation.solve import keep_running, plan_allocation
from planner.baselines.homo_joint import plan_homo_joint, plan_never_worse
from planner.errors import LeastServedError
from planner.types import Market, Offer, Phase
from tests.builders import EXACT, offer, template, workload

AGG = Phase.AGGREGATED


def binding_kinds(plan) -> set[str]:
    return {found.limit.kind for found in plan.binding}


def two_domains(**changes) -> AllocationInput:
    """Aggregated replicas in two domains, the first one cheaper."""
    values = {
        "workloads": [workload("chat", 4.0)],
        "templates": [template("m", AGG, {"A x1": 1}, 1.0)],
        "offers": [
            replace(offer("d1", "A x1", 2.0, 9), vcpus=8),
            replace(offer("d2", "A x1", 3.0, 9), vcpus=8),
            replace(offer("d1", "A x1", 1.0, 9, Market.SPOT), vcpus=8),
        ],
    }
    values.update(changes)
    return AllocationInput.of(settings=EXACT, **values)


def nodes_by(plan, key) -> dict:
    found: dict = {}
    for planned in plan.nodes:
        found[key(planned.offer)] = found.get(key(planned.offer), 0) + planned.count
    return found


def test_without_options_everything_goes_to_the_cheapest() -> None:
    plan = plan_allocation(two_domains())
    assert nodes_by(plan, lambda o: (o.domain, o.market)) == {("d1", Market.SPOT): 4}
    assert binding_kinds(plan) == set()


def test_a_quota_binds_and_is_explained() -> None:
    quota = Quota(vcpus=23, domains="d1", instance_types="type-A*", market=Market.SPOT)
    plan = plan_allocation(two_domains(options=AllocationOptions(quotas=(quota,))))
    assert nodes_by(plan, lambda o: (o.domain, o.market)) == {
        ("d1", Market.SPOT): 2,
        ("d1", Market.ON_DEMAND): 2,
    }
    found = next(b for b in plan.binding if b.limit.kind == "quota")
    assert found.used == 16  # a third node of 8 vCPUs does not fit in 23
    assert found.worth == pytest.approx((1 + 10 / 60) / 8)  # USD/hour for one more vCPU
    assert describe_binding(found).startswith(
        "quota of 23 spot vCPUs for type-A* in d1: 16 used; one more vCPU would save about $0.15"
    )


def test_the_spot_share_binds_and_is_explained() -> None:
    plan = plan_allocation(two_domains(options=AllocationOptions(largest_spot_share=0.5)))
    assert nodes_by(plan, lambda o: o.market) == {Market.SPOT: 2, Market.ON_DEMAND: 2}
    found = next(b for b in plan.binding if b.limit.kind == "spot share")
    assert "at most 50% of the rented GPUs on spot" in describe_binding(found)


def test_a_budget_binds_and_is_explained() -> None:
    plan = plan_allocation(two_domains(options=AllocationOptions(budget_usd_per_hour=3.5)))
    assert plan.cost_usd_per_hour == pytest.approx(3.0)
    assert plan.services[0].served_rps == pytest.approx(3.0)
    found = next(b for b in plan.binding if b.limit.kind == "budget")
    assert describe_binding(found).startswith("budget of $3.5/h: 3 used; one more USD/hour would")
    assert found.worth_unit == "requests/s"


def test_spread_binds_and_is_explained() -> None:
    rules = {"chat": ServiceRules(largest_domain_share=0.5)}
    plan = plan_allocation(two_domains(rules=rules))
    assert nodes_by(plan, lambda o: o.domain) == {"d1": 2, "d2": 2}
    found = next(b for b in plan.binding if b.limit.kind == "spread")
    assert "at most 50% of chat in one domain (d1)" in describe_binding(found)
    assert found.worth > 0


def test_allowed_domains_bind_and_are_explained() -> None:
    rules = {"chat": ServiceRules(domains=frozenset({"d2"}))}
    plan = plan_allocation(two_domains(rules=rules))
    assert nodes_by(plan, lambda o: o.domain) == {"d2": 4}
    assert describe_rules(rules, plan) == ["chat may be served only in d2."]
    nowhere = {"chat": ServiceRules(domains=frozenset({"d3"}))}
    assert plan_allocation(two_domains(rules=nowhere)).served_share == 0.0


def test_least_served_binds_is_explained_and_refused_where_impossible() -> None:
    scarce = {
        "workloads": [workload("chat", 4.0, weight=5.0), workload("code", 4.0)],
        "templates": [
            template("m", AGG, {"A x1": 1}, 1.0),
            template("n", AGG, {"A x1": 1}, 1.0, "code"),
        ],
        "offers": [offer("d1", "A x1", 2.0, 5)],
    }
    free = plan_allocation(two_domains(**scarce))
    assert {s.workload: s.served_rps for s in free.services} == {"chat": 4.0, "code": 1.0}
    rules = {"code": ServiceRules(least_served=0.5)}
    plan = plan_allocation(two_domains(**scarce, rules=rules))
    assert {s.workload: s.served_rps for s in plan.services} == {"chat": 3.0, "code": 2.0}
    found = next(b for b in plan.binding if b.limit.kind == "least served")
    assert "at least 50% of code served" in describe_binding(found)
    both = {name: ServiceRules(least_served=0.9) for name in ("chat", "code")}
    with pytest.raises(LeastServedError, match=r"asks for 90\.0% and at most \d+\.\d% can be"):
        plan_allocation(two_domains(**scarce, rules=both))


def test_owned_nodes_come_first_have_their_own_stock_and_cost_nothing() -> None:
    owned = Offer("d2", "type-A x1", "A x1", Market.OWNED, 0.0, 2, "owned", vcpus=8)
    data = two_domains()
    plan = plan_allocation(replace(data, offers=(*data.offers, owned)))
    assert nodes_by(plan, lambda o: o.market) == {Market.OWNED: 2, Market.SPOT: 2}
    assert plan.cost_usd_per_hour == pytest.approx(2.0)
    found = next(b for b in plan.binding if b.limit.kind == "owned")
    assert describe_binding(found).startswith("owned A x1 (type-A x1) in d2: all 2 used; one more")
    with pytest.raises(ValueError, match="owned nodes have no price"):
        replace(owned, price_usd_per_hour=1.0)


def test_egress_moves_the_load_and_is_paid() -> None:
    rules = {"chat": ServiceRules(origin="d2")}
    long = replace(workload("chat", 4.0).lengths, mean_input=5e5, p95_input=5e5)
    far = {"workloads": [replace(workload("chat", 4.0), lengths=long)], "rules": rules}
    options = AllocationOptions(egress_usd_per_gib={"d1": 1.0})
    plan = plan_allocation(two_domains(**far, options=options))
    assert nodes_by(plan, lambda o: o.domain) == {"d2": 4}  # 27 USD/h of egress would be dearer
    cheap = AllocationOptions(egress_usd_per_gib={"d1": 0.01})
    plan = plan_allocation(two_domains(**far, options=cheap))
    assert nodes_by(plan, lambda o: o.domain) == {"d1": 4}
    gib_per_hour = 4.0 * 3600 * (5e5 + 100) * 4 / 2**30
    assert plan.egress_usd_per_hour == pytest.approx(0.01 * gib_per_hour, rel=1e-3)
    assert describe_rules(rules, plan) == [
        "Traffic that leaves for its origin costs $0.27/h of egress besides."
    ]
    assert plan.objective_usd == pytest.approx(4.0 * (1 + 10 / 60) + plan.egress_usd_per_hour)


def test_dropped_nodes_are_paid_while_they_drain() -> None:
    held = {("d2", "type-A x1", Market.ON_DEMAND): 1}
    plan = plan_allocation(two_domains(held=held))
    drained = 3.0 * 2 / 60 if not nodes_by(plan, lambda o: o.domain).get("d2") else 0.0
    assert drained > 0
    assert plan.objective_usd == pytest.approx(4.0 * (1 + 10 / 60) + drained)


def test_a_running_plan_can_be_kept_and_priced() -> None:
    data = two_domains()
    plan = plan_allocation(data)
    held, replicas = plan.node_counts, plan.replica_counts
    again = keep_running(replace(data, held=held), replicas, held)
    assert again is not None
    assert again.objective_usd == pytest.approx(plan.cost_usd_per_hour)  # no start-up any more
    assert again.served_share == 1.0
    gone = replace(data, offers=data.offers[:1])
    assert keep_running(gone, replicas, held) is None
    less = replace(data, offers=tuple(replace(o, stock=3) for o in data.offers))
    assert keep_running(less, replicas, held) is None


def test_the_plan_check_knows_the_options() -> None:
    data = two_domains()
    plan = plan_allocation(data)
    for changes, label in (
        ({"options": AllocationOptions(quotas=(Quota(8),))}, "A7"),
        ({"options": AllocationOptions(largest_spot_share=0.5)}, "A8"),
        ({"rules": {"chat": ServiceRules(largest_domain_share=0.5)}}, "A9"),
        ({"options": AllocationOptions(budget_usd_per_hour=1.0)}, "A10"),
        ({"rules": {"chat": ServiceRules(domains=frozenset({"d2"}))}}, "may not be served"),
    ):
        with pytest.raises(PlanCheckError, match=label):
            check_plan(replace(data, **changes), plan)


def test_homo_joint_falls_short_where_only_mixed_replicas_keep_a_least_served_share() -> None:
    data = AllocationInput.of(
        [workload("chat", 3.0)],
        [
            template("m", AGG, {"A x1": 1, "B x1": 1}, 1.0),
            template("a", AGG, {"A x1": 1}, 0.4),
        ],
        [offer("d1", "A x1", 2.0, 3), offer("d1", "B x1", 1.0, 3)],
        settings=EXACT,
        rules={"chat": ServiceRules(least_served=1.0)},
    )
    homo = plan_homo_joint(data)
    assert homo.services[0].served_rps == pytest.approx(1.2)
    assert plan_never_worse(data, homo).served_share == 1.0

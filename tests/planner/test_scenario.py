"""Scenario resolution: every name looked up, every mistake named with the way out."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from planner.demand import DemandHistory, forecast_demand
from planner.errors import InputError, MarketError, ScenarioError, UnknownNameError
from planner.known import Known
from planner.resolve import resolve_scenario
from planner.types import Market, Phase
from tasks.scenario_file import parse_scenario

TINY: dict[str, Any] = {
    "name": "t",
    "workloads": [
        {
            "model": "Qwen/Qwen3-14B",
            "slo": {"ttft_ms": 1000, "tpot_ms": 40},
            "lengths": "azure2023_conv",
            "demand": {"requests_per_s": 2},
        }
    ],
    "node_classes": ["L4 x1", "H100 x1"],
    "domains": ["aws:us-east-1"],
}


def changed(**changes: Any) -> dict[str, Any]:
    content = copy.deepcopy(TINY)
    for path, value in changes.items():
        at, *rest = path.split("__")
        if rest:
            target = content["workloads"][0] if at == "workload" else content[at]
            for key in rest[:-1]:
                target = target[key]
            target[rest[-1]] = value
        else:
            content[at] = value
    return content


def resolve(known: Known, content: dict[str, Any]):
    return resolve_scenario(parse_scenario(content, "t.yaml"), known)


def test_a_scenario_resolves_to_types_with_units(known: Known) -> None:
    scenario = resolve(known, changed(demand_scale=3.0, markets=["on_demand", "spot"]))
    workload = scenario.workloads[0]
    assert workload.name == "Qwen3-14B"
    assert workload.demand_rps == 6.0
    assert workload.lengths.mean_input == pytest.approx(1154.7, abs=0.1)
    assert {offer.market for offer in scenario.offers} == {Market.ON_DEMAND, Market.SPOT}
    l4 = [o for o in scenario.offers if o.node_class == "L4 x1"]
    assert {o.stock for o in l4} == {20}
    assert all(o.stock_source == "assumed, level limited" for o in scenario.offers)
    assert scenario.placement.utilization[Phase.DECODE] == 0.9


def test_the_price_of_a_region_is_that_of_its_cheapest_zone(known: Known) -> None:
    scenario = resolve(known, changed(markets=["spot"]))
    for offer in scenario.offers:
        zones = [
            row.price_usd_per_hour
            for row in known.prices
            if (row.domain, row.instance_type, row.market)
            == (offer.domain, offer.instance_type, offer.market)
        ]
        assert offer.price_usd_per_hour == min(zones)


def test_classes_without_a_price_in_some_domain_are_named(known: Known) -> None:
    domains = ["aws:us-east-1", "aws:us-west-2"]
    scenario = resolve(known, changed(domains=domains))
    assert scenario.unpriced == ()
    prices = [
        row
        for row in known.prices
        if not (row.domain == "aws:us-west-2" and row.node_class == "H100 x1")
    ]
    scenario = resolve(replace(known, prices=prices), changed(domains=domains))
    assert scenario.unpriced == ("H100 x1 in aws:us-west-2",)
    assert all(o.domain != "aws:us-west-2" or o.node_class != "H100 x1" for o in scenario.offers)


def test_demand_of_a_history_is_forecast_over_start_up_and_interval(known: Known) -> None:
    demand = {"history": "servegen-m-mid", "until_hours": 100, "scale": 0.01}
    scenario = resolve(known, changed(workload__demand=demand))
    history = DemandHistory.of("m-mid", *known.histories["servegen-m-mid"])
    expected = forecast_demand(history.until(600), 20.0)
    assert scenario.forecasts == {"Qwen3-14B": expected}
    assert scenario.workloads[0].demand_rps == pytest.approx(0.01 * expected.rate_rps)


def test_demand_of_a_trace_is_a_quantile_of_its_minutes(known: Known) -> None:
    rates = sorted(known.trace_rps["azure2023_conv"])
    demand = {"trace": "azure2023_conv", "quantile": 0.95, "scale": 0.5}
    workload = resolve(known, changed(workload__demand=demand)).workloads[0]
    assert workload.demand_rps == pytest.approx(0.5 * rates[int(0.95 * len(rates)) - 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload__model": "Qwen/Qwen3-14"}, r"unknown model .* did you mean 'Qwen/Qwen3-14B'"),
        ({"node_classes": ["H1O0 x1"]}, r"unknown GPU 'H1O0' in node class .* mean 'H100'"),
        ({"node_classes": ["L4 x3"]}, r"unknown node class 'L4 x3' .* did you mean 'L4 x"),
        ({"domains": ["aws:us-east1"]}, r"unknown domain 'aws:us-east1' .* 'aws:us-east-1'"),
        ({"workload__lengths": "azure2023_con"}, r"length distribution .* 'azure2023_conv'"),
        ({"workload__demand": {"trace": "azur"}}, r"unknown trace 'azur'"),
        ({"workload__demand": {"history": "servegen"}}, r"unknown demand history 'servegen'"),
        (
            {"workload__demand": {"history": "servegen-m-mid", "until_hours": 1}},
            r"'servegen-m-mid' has 6 windows of 10 minutes; a forecast over 20 minutes needs",
        ),
        ({"domains": ["aws:us-east-1", "aws:us-east-1"]}, r"domain 'aws:us-east-1' is there twice"),
        ({"node_classes": ["L4 x1", "L4 x1"]}, r"node class 'L4 x1' is there twice"),
        ({"workloads": TINY["workloads"] * 2}, r"workload name 'Qwen3-14B' is there twice"),
        ({"stock": {"factor": 0.0}}, r"no domain offers any of its node classes with stock"),
        (
            {
                "workload__lengths": {
                    "mean_input": 9, "mean_output": 9, "p95_input": 1, "p95_output": 9,
                }
            },
            r"a p95 below its mean",
        ),
    ],
)  # fmt: skip
def test_wrong_names_are_named(known: Known, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(known, changed(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload__slo": {"ttft_ms": 0, "tpot_ms": 1}}, r"workloads.0.slo.ttft_ms: .* got 0"),
        ({"workload__demand": {"requests_per_s": -1}}, r"requests_per_s: .* got -1"),
        ({"workload__demand": {}}, r"give one of requests_per_s, trace, history and observed"),
        ({"workload__demand": {"requests_per_s": float("nan")}}, r"requests_per_s: .* got nan"),
        ({"workload__demand": {"trace": "azure2023_conv", "until_hours": 1}}, r"goes with history"),
        ({"domain": ["x"]}, r"unknown key 'domain'; did you mean 'domain"),
        ({"placement": {"max_node": 2}}, r"unknown key 'placement.max_node'; .* 'max_nodes'"),
        ({"markets": ["spott"]}, r"markets.0"),
        ({"workloads": []}, r"workloads"),
        ({"stock": {"level": "plenty"}}, r"stock.level"),
        ({"placement": {"max_nodes": 0}}, r"placement.max_nodes"),
    ],
)
def test_wrong_values_name_their_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        parse_scenario(changed(**changes), "t.yaml")


def test_unknown_stock_is_left_out_or_assumed_and_said(known: Known) -> None:
    content = changed(node_classes=["L4 x1", "H200 x8", "B200 x8"])
    sure = resolve(known, content)
    assert {offer.node_class for offer in sure.offers} == {"L4 x1"}
    content["stock"] = {"unknown_gpus": 32, "factor": 0.5}
    scenario = resolve(known, content)
    unknown = [offer for offer in scenario.offers if offer.node_class != "L4 x1"]
    assert {offer.stock for offer in unknown} == {2}  # half of 32 / 8
    assert {offer.stock_source for offer in unknown} == {"stock unknown: assumed 2 nodes"}
    assert "where unknown, 32 GPUs x 0.5 by type and domain" in scenario.stock_note
    assert {o.stock_source for o in scenario.offers} - {unknown[0].stock_source} == {
        scenario.stock_note
    }


def test_a_bad_price_in_the_catalog_is_refused(known: Known) -> None:
    bad = replace(known.prices[0], price_usd_per_hour=-1.0)
    broken = replace(known, prices=[bad, *known.prices[1:]])
    with pytest.raises(MarketError, match=r"price must be positive, got -1.0; correct or remove"):
        resolve(broken, TINY)


def test_unknown_names_without_a_near_one_list_what_is_known() -> None:
    error = UnknownNameError("GPU", "zzz", ["H100", "L4"])
    assert str(error) == "unknown GPU 'zzz'; known: H100, L4"

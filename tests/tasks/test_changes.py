"""What-if files: each kind changes what it says, and a wrong one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.allocation.problem import AllocationInput
from planner.types import Market, Phase
from tasks.changes import WhatIfError, change_input
from tests.builders import EXACT, offer, template, workload


@pytest.fixture
def data() -> AllocationInput:
    return AllocationInput.of(
        [workload("chat", 4.0), workload("code", 2.0)],
        [
            template("chat", Phase.AGGREGATED, {"A x1": 1}, 1.0),
            template("code", Phase.AGGREGATED, {"B x1": 1}, 1.0, "code"),
        ],
        [
            offer("aws:east", "A x1", 1.0, 5),
            offer("aws:east", "A x1", 0.5, 5, Market.SPOT),
            offer("gcp:west", "B x1", 3.0, 7),
        ],
        settings=EXACT,
    )


def changed(data: AllocationInput, tmp_path: Path, *lines: str) -> AllocationInput:
    file = tmp_path / "change.csv"
    file.write_text("\n".join(lines) + "\n")
    return change_input(data, [file])


def prices(data: AllocationInput) -> list[float]:
    return [o.price_usd_per_hour for o in data.offers]


def test_prices_by_place_and_market(data: AllocationInput, tmp_path: Path) -> None:
    found = changed(data, tmp_path, "domain,market,price_usd_per_hour", "aws:*,spot,0.7")
    assert prices(found) == [1.0, 0.7, 3.0]
    found = changed(data, tmp_path, "node_class,price_factor", "A x1,2", "*,0.5")
    assert prices(found) == [1.0, 0.5, 1.5]


def test_stock_of_both_markets(data: AllocationInput, tmp_path: Path) -> None:
    found = changed(data, tmp_path, "domain,node_class,stock", "aws:east,,9")
    assert [o.stock for o in found.offers] == [9, 9, 7]
    found = changed(data, tmp_path, "stock_factor", "0.5")
    assert [o.stock for o in found.offers] == [2, 2, 3]
    assert found.offers[0].stock_source == "what-if"


def test_demand_of_one_or_of_all(data: AllocationInput, tmp_path: Path) -> None:
    found = changed(data, tmp_path, "workload,requests_per_s", "chat,0")
    assert [w.demand_rps for w in found.workloads] == [0.0, 2.0]
    found = changed(data, tmp_path, "demand_factor", "1.5")
    assert [w.demand_rps for w in found.workloads] == [6.0, 3.0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["price_usd_per_hour", "0"], "line 2: a price must be positive, got 0"),
        (["price_factor", "-1"], "line 2: price_factor must be a number from 0 up, got '-1'"),
        (["stock", "nan"], "stock must be a number from 0 up, got 'nan'"),
        (["stock", "many"], "stock must be a number from 0 up, got 'many'"),
        (["domain,stock", "azure:x,1"], "line 2: no offer of the scenario matches domain=azure:x"),
        (["workload,requests_per_s", "mail,1"], "no workload matches workload=mail; there are"),
        (["price", "1"], "one column must say what changes"),
        (["stock,price_factor", "1,1"], "found stock, price_factor"),
        (["market,stock", "spot,1"], "unknown column 'market'; stock goes with domain"),
        (["stock"], "has no line below its header"),
    ],
)
def test_wrong_files_are_named(
    data: AllocationInput, tmp_path: Path, lines: list[str], message: str
) -> None:
    with pytest.raises(WhatIfError) as caught:
        changed(data, tmp_path, *lines)
    assert message in str(caught.value)


def test_a_file_that_is_not_there(data: AllocationInput, tmp_path: Path) -> None:
    with pytest.raises(WhatIfError, match="cannot read what-if file"):
        change_input(data, [tmp_path / "none.csv"])

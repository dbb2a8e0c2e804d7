"""What analysts ask: the documented examples run, and the views say what they should."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import polars as pl
import pytest

from catalog.errors import QueryError
from catalog.store import Catalog
from executor.lease_store import SqliteLeaseStore
from planner.baselines.homo_joint import plan_homo_joint
from planner.leases import Lease, LeaseState
from planner.types import Market
from tasks.allocation import allocation_input, conclude, read_library
from tasks.inputs import load_inputs
from tasks.lease_copy import copy_leases
from tasks.scenario_file import read_scenario
from tasks.sql_output import OutputError, write_answer

BEGAN = datetime(2026, 3, 1, 22, tzinfo=UTC)


def test_documented_examples_run(planned: Catalog, repository: Path) -> None:
    text = (repository / "docs" / "sql.md").read_text()
    blocks = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    queries = [query.strip() for block in blocks for query in block.split(";") if query.strip()]
    assert len(queries) >= 20
    for query in queries:
        columns, _ = planned.query(query)
        assert columns, query


def test_every_view_is_documented(planned: Catalog, repository: Path) -> None:
    text = (repository / "docs" / "sql.md").read_text()
    _, rows = planned.query("SELECT view_name FROM duckdb_views() WHERE NOT internal")
    assert [name for (name,) in rows if f"`{name}`" not in text] == []


def test_spend_is_split_at_midnight(planned: Catalog) -> None:
    _, rows = planned.query("SELECT CAST(day AS TEXT), node_hours, usd FROM spend_by_day")
    assert rows == [("2026-03-01", 2.0, 4.0), ("2026-03-02", 3.0, 6.0)]
    assert planned.query("FROM fleet_now")[1] == []


def test_another_lease_file_is_taken_in_anew(planned: Catalog, tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    shutil.copy(planned.database, catalog.database)
    store = SqliteLeaseStore(tmp_path / "leases.sqlite")  # the old one was lost
    assert copy_leases(catalog) == []
    lease = Lease(
        "new", "aws:us-east-1", "g6.xlarge", "L4 x1", Market.SPOT, 1.0, LeaseState.PLANNED, BEGAN,
        scenario="tiny",
    )  # fmt: skip
    store.save(lease, BEGAN)
    assert [event.lease_id for event in copy_leases(catalog)] == ["new"]
    with catalog.read() as connection:
        assert connection.execute("SELECT lease_id FROM lease").fetchall() == [("new",)]
    assert copy_leases(catalog) == []


def test_only_the_last_plan_of_a_round_costs(planned: Catalog, tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    shutil.copy(planned.database, catalog.database)
    inputs = load_inputs(catalog, read_scenario("tiny"))
    data = allocation_input(inputs, read_library(catalog, inputs))
    at = BEGAN + timedelta(hours=1)
    plan = plan_homo_joint(data)
    for _ in range(2):  # planned again in the same round
        conclude(catalog, inputs, data, plan, plan, applied=True, at=at)
    catalog.publish(force=True)
    (one,) = catalog.query(
        "SELECT count(*), sum(cost_usd_per_hour) FROM model_cost WHERE created_at = ?", [at]
    )[1]
    assert one == (1, pytest.approx(plan.cost_usd_per_hour))
    # The fleet's last node ended at three the next morning: nothing costs after that.
    days = catalog.query("SELECT CAST(day AS TEXT), usd FROM model_cost_by_day")[1]
    hours = {"2026-03-01": 1.0, "2026-03-02": 3.0}
    assert dict(days) == {
        day: pytest.approx(spent * plan.cost_usd_per_hour) for day, spent in hours.items()
    }


def test_cost_of_a_plan_by_model_adds_up(planned: Catalog) -> None:
    (both,) = planned.query(
        "SELECT (SELECT sum(cost_usd_per_hour) FROM model_cost), cost_usd_per_hour "
        "FROM allocation WHERE planner = 'coral'"
    )[1]
    assert both[0] == pytest.approx(both[1])


def test_answers_in_files(planned: Catalog, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    query = "SELECT workload, demand_rps FROM allocation_service ORDER BY ALL"
    expected = planned.query(query)[1]
    assert write_answer(planned, query, "parquet", tmp_path / "a.parquet") == len(expected)
    assert pl.read_parquet(tmp_path / "a.parquet").rows() == expected
    write_answer(planned, query, "csv", None)
    assert pl.read_csv(capsys.readouterr().out.encode()).rows() == expected
    write_answer(planned, query, "json", tmp_path / "a.json")
    assert pl.read_json(tmp_path / "a.json").rows() == expected
    for form, output, why in (
        ("parquet", None, "name a file"),
        ("xml", None, "unknown format 'xml'"),
        ("csv", tmp_path / "no" / "a.csv", "cannot write"),
    ):
        with pytest.raises(OutputError, match=why):
            write_answer(planned, query, form, output)
    with pytest.raises(OutputError, match="names of the answer is a list"):
        write_answer(planned, "SELECT list(workload) AS names FROM workload", "csv", None)
    with pytest.raises(QueryError, match="no rows"):
        write_answer(planned, "-- nothing", "csv", None)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "a.parquet"]


def test_the_snapshot_opens_elsewhere_while_the_database_is_written(planned: Catalog) -> None:
    with planned.write() as writer:
        writer.execute("UPDATE allocation SET stock_note = stock_note")
        with duckdb.connect(str(planned.snapshot), read_only=True) as reader:
            assert reader.execute("SELECT count(*) FROM allocation").fetchall() == [(2,)]

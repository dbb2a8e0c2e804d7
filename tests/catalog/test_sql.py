"""What analysts ask: the documented examples run, and the views say what they should."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import polars as pl
import pytest

from catalog.store import Catalog
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
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "a.parquet"]


def test_the_snapshot_opens_elsewhere_while_the_database_is_written(planned: Catalog) -> None:
    with planned.write() as writer:
        writer.execute("UPDATE allocation SET stock_note = stock_note")
        with duckdb.connect(str(planned.snapshot), read_only=True) as reader:
            assert reader.execute("SELECT count(*) FROM allocation").fetchall() == [(2,)]

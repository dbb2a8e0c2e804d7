"""The database: seed, migrations, locks, snapshot, SQL."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import polars as pl
import pytest

from catalog import migrations, reads, writes
from catalog.errors import (
    DatabaseError,
    DatabaseLockedError,
    DatabaseNewerError,
    QueryError,
    SeedError,
)
from catalog.seed import KEYS, import_seed, judge_offers, seed_folder
from catalog.store import Catalog
from planner.types import Phase
from tests.builders import template, workload


def test_seed_rejects_the_suspect_prices_with_reasons(seeded: Catalog) -> None:
    with seeded.read() as connection:
        counts = reads.read_rejected(connection)
    assert counts["source marks the prices as mismatched"] == 2 * 44
    assert counts["spot not below on-demand"] == 42
    offers = pl.read_csv(seed_folder() / "gpu_offers.csv", infer_schema_length=None)
    prices = offers["on_demand_usd_h"].count() + offers["spot_usd_h"].count()
    assert sum(counts.values()) == prices  # nothing is dropped silently


def test_no_accepted_spot_price_is_above_its_on_demand_price(seeded: Catalog) -> None:
    with seeded.read() as connection:
        wrong = connection.execute(
            "SELECT s.domain FROM offer s JOIN offer d USING (domain, instance_type) "
            "WHERE s.market = 'spot' AND d.market = 'on_demand' "
            "AND s.zone IS NOT DISTINCT FROM d.zone "
            "AND s.rejected_because IS NULL AND s.price_usd_per_hour >= d.price_usd_per_hour"
        ).fetchall()
    assert wrong == []


def test_offers_are_judged_by_value() -> None:
    frame = pl.DataFrame(
        {
            "cloud": ["c"] * 6, "region": ["r"] * 6, "zone": list("abcdef"),
            "instance_type": ["t"] * 6, "gpu": ["L4"] * 6, "gpu_count": [1.0] * 6,
            "on_demand_usd_h": [1.0, 1.0, 0.0, 1.0, 1.0, 1.0],
            "spot_usd_h": [0.5, 1.0, None, -2.0, 0.99995, None],
            "source": ["s"] * 6, "source_date": [None] * 6,
            "note": [None, None, None, None, None, "SUSPECT: no"],
        }
    )  # fmt: skip
    judged = judge_offers(frame)
    found = {
        (z, m): why for z, m, why in judged.select("zone", "market", "rejected_because").rows()
    }
    assert found["a", "spot"] is None and found["a", "on_demand"] is None
    assert found["b", "spot"] == "spot not below on-demand"
    assert found["c", "on_demand"] == "price is not positive"
    assert found["d", "spot"] == "price is not positive"
    assert found["e", "spot"] == "spot not below on-demand"  # rounding of the source
    assert found["f", "on_demand"] == "source marks the prices as mismatched"
    twice = judge_offers(pl.concat([frame.head(1), frame.head(1)]))
    assert twice["rejected_because"].to_list().count("duplicate") == 2


def test_seeding_twice_changes_nothing(seeded: Catalog) -> None:
    with seeded.write() as connection:
        assert import_seed(connection) is False


def test_missing_seed_file_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "home")
    with pytest.raises(SeedError, match="install Coral again"), catalog.write() as connection:
        import_seed(connection, tmp_path)
    with catalog.read() as connection:
        assert connection.execute("SELECT count(*) FROM gpu").fetchall() == [(0,)]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    with pytest.raises(RuntimeError), catalog.write() as connection:
        connection.execute("INSERT INTO gpu VALUES ('x', 'x', 1, 1, 1, 1, 1, 'x')")
        raise RuntimeError
    with catalog.read() as connection:
        assert connection.execute("SELECT gpu FROM gpu").fetchall() == []


def test_templates_come_back_as_they_went(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    stored = template("k1", Phase.DECODE, {"A x1": 2, "B x1": 1}, 3.0)
    solved = pl.DataFrame(
        {
            "solution_id": ["k1", "k2"],
            "combination": [json.dumps(stored.combination), '[["A x1", 1]]'],
            "outcome": ["kept", "no placement inside the SLO"],
            "best_rps": [3.0, 0.0],
            "proven": [True, True],
            "searches": [4, 0],
            "seconds": [0.1, 0.1],
        }
    )
    for _ in range(2):  # twice is once
        with catalog.write() as connection:
            writes.write_solutions(
                connection, workload(), Phase.DECODE, solved, [stored], datetime.now(UTC)
            )
    with catalog.read() as connection:
        assert reads.read_templates(connection, ["k1", "nothing"]) == [stored]
        found = reads.read_solutions(connection, ["nothing", "k1", "k2"])
    assert found["position"].to_list() == [1, 2]
    assert found["best_rps"].to_list() == [3.0, 0.0]


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    with catalog.write() as connection:
        connection.execute("INSERT INTO schema_version VALUES (99, 'future', now())")
    with pytest.raises(DatabaseNewerError, match=r"schema version 99 .* upgrade Coral"):
        catalog.write().__enter__()


def test_migrations_run_once_and_in_order(tmp_path: Path) -> None:
    connection = duckdb.connect(str(tmp_path / "m.duckdb"))
    assert migrations.migrate(connection) == len(migrations.MIGRATIONS)
    assert migrations.migrate(connection) == 0
    assert migrations.schema_version(connection) == len(migrations.MIGRATIONS)


def test_an_unreadable_file_is_named_and_kept(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.database.write_bytes(b"this is no database" * 1000)
    with pytest.raises(DatabaseError, match=r"coral.duckdb is not a database .* move it away"):
        catalog.read().__enter__()
    assert catalog.database.read_bytes().startswith(b"this is no database")


@pytest.mark.parametrize("damage", ["truncated", "middle", "foreign"])
def test_damaged_and_foreign_files_are_named(tmp_path: Path, damage: str) -> None:
    catalog = Catalog(tmp_path, patience_s=1.0)
    if damage == "foreign":
        with duckdb.connect(str(catalog.database)) as other:
            other.execute("CREATE TABLE gpu (whatever INTEGER)")
    else:
        with catalog.write() as connection:
            import_seed(connection)
        content = bytearray(catalog.database.read_bytes())
        half = len(content) // 2
        content[12_288:half] = b"x" * (half - 12_288)
        catalog.database.write_bytes(content[:half] if damage == "truncated" else content)

    def read_everything() -> None:
        with catalog.write() as connection:
            for (table,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall():
                connection.execute(f"SELECT * FROM {table}").fetchall()

    with pytest.raises(DatabaseError, match="not a database that Coral can read"):
        read_everything()


def test_a_home_with_an_apostrophe_works_and_a_lock_folder_is_named(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "it's here")
    assert catalog.publish(force=True)
    assert catalog.query("SELECT 1 AS a") == (["a"], [(1,)])
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "coral.lock").mkdir()
    with pytest.raises(DatabaseError, match="choose another home"):
        Catalog(tmp_path / "home").write().__enter__()


def test_a_file_held_by_another_program_is_named(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path, patience_s=1.0)
    with catalog.write():
        pass
    hold = "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(catalog.database)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(DatabaseLockedError, match="is locked by another program; close it"):
            catalog.read().__enter__()
        holder.kill()


def test_two_writers_take_turns_and_the_second_may_run_out_of_patience(tmp_path: Path) -> None:
    with (
        Catalog(tmp_path).write(),
        pytest.raises(DatabaseLockedError, match=r"another Coral process has kept .* busy"),
    ):
        Catalog(tmp_path, patience_s=0.3).write().__enter__()
    with Catalog(tmp_path).write():
        pass


def test_readers_of_the_snapshot_meet_no_lock_while_writers_write(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    with catalog.write() as connection:
        connection.execute("CREATE TABLE t (a INTEGER)")
    catalog.publish(force=True)
    stop = threading.Event()
    counts: list[int] = []

    def read() -> None:
        while not stop.is_set():
            counts.append(int(str(catalog.query("SELECT count(*) FROM t")[1][0][0])))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(10):
        with catalog.write() as connection:
            connection.execute("INSERT INTO t VALUES (1), (2)")
        catalog.publish(force=True)
    stop.set()
    reader.join()
    assert counts == sorted(counts)
    assert all(count % 2 == 0 for count in counts)  # never a half-written state
    assert catalog.query("SELECT count(*) FROM t")[1] == [(20,)]


def test_the_snapshot_is_published_at_most_every_half_minute(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    assert catalog.publish()
    assert not catalog.publish()
    assert catalog.publish(force=True)


def test_sql_errors_and_missing_snapshots_are_named(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    with pytest.raises(DatabaseError, match="run `coral quickstart` first"):
        catalog.query("SELECT 1")
    catalog.publish(force=True)
    with pytest.raises(QueryError, match="SQL: "):
        catalog.query("SELEC 1")
    with pytest.raises(QueryError, match="read-only"):
        catalog.query("CREATE TABLE x (a INTEGER)")
    catalog.snapshot.write_bytes(b"broken" * 5000)
    with pytest.raises(DatabaseError, match="not a database"):
        catalog.query("SELECT 1")


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DatabaseError, match="cannot create the home folder"):
        Catalog(tmp_path / "file" / "home").write().__enter__()


def test_an_older_home_gets_the_shipped_rows_that_it_lacks_and_keeps_its_own(
    tmp_path: Path,
) -> None:
    catalog = Catalog(tmp_path)
    with catalog.write() as connection:
        assert import_seed(connection)
    count = "SELECT count(*) FROM "
    tables = list(KEYS)
    with catalog.write() as connection:
        before = [connection.execute(count + table).fetchall() for table in tables]
        connection.execute("DELETE FROM seed_import")  # what a home of an earlier Coral lacks
        connection.execute("DELETE FROM model WHERE model LIKE 'google/%'")
        connection.execute("DELETE FROM instance_type WHERE cloud = 'azure'")
        connection.execute("UPDATE model SET note = 'mine' WHERE model = 'Qwen/Qwen3-14B'")
    with catalog.write() as connection:
        assert import_seed(connection)
        assert not import_seed(connection)
    with catalog.read() as connection:
        assert [connection.execute(count + table).fetchall() for table in tables] == before
        note = connection.execute("SELECT note FROM model WHERE model = 'Qwen/Qwen3-14B'")
        assert note.fetchall() == [("mine",)]


def test_shapes_and_bytes_of_the_shipped_models_agree() -> None:
    """A layer's bytes are its matrices', and little more: norms, biases, scales."""
    rows = pl.read_csv(seed_folder() / "model_specs.csv").rows(named=True)
    for row in rows:
        if row["hf_id"] == "deepseek-ai/DeepSeek-V3":  # latent attention, mixed dtypes
            continue
        heads, kv_heads, width = row["heads"], row["kv_heads"], row["head_dim"]
        matrices = 2 * row["hidden"] * width * (heads + kv_heads) * row["dtype_bytes"]
        if row["experts"]:
            matrices += row["hidden"] * row["experts"] * row["dtype_bytes"]
            expert = 3 * row["hidden"] * row["moe_intermediate"]
            matrices += row["experts"] * expert * row["moe_dtype_bytes"]
        else:
            matrices += 3 * row["hidden"] * row["intermediate"] * row["dtype_bytes"]
        assert matrices <= row["bytes_per_layer"] <= 1.001 * matrices, row["hf_id"]
        assert row["embed_bytes"] == row["vocab"] * row["hidden"] * row["dtype_bytes"]
        assert row["kv_bytes_per_token_per_layer"] == 2 * 2 * kv_heads * width, row["hf_id"]

"""A disk without room: one sentence, and all from before is there."""

from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from catalog.errors import SnapshotError
from catalog.store import Catalog
from executor.lease_store import LeaseStoreError, SqliteLeaseStore
from planner.leases import Lease, LeaseState
from planner.types import Market

# A process whose files may not grow beyond a size: DuckDB and SQLite meet what a full disk is.
FULL = """
import resource, sys
from pathlib import Path
from catalog.errors import DiskFullError
from catalog.store import Catalog
catalog = Catalog(Path(sys.argv[1]))
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    with catalog.write() as connection:
        connection.execute("CREATE TABLE large AS SELECT random() AS x FROM range(2000000)")
except DiskFullError as error:
    print(error)
"""


def test_a_commit_that_does_not_fit_leaves_all_as_it_was(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    with catalog.write() as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS x")
    catalog.publish(force=True)
    limit = catalog.database.stat().st_size + 2**20
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path, str(limit)], capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert "no room left on the disk" in done.stdout, done.stderr
    with catalog.read() as connection:
        assert connection.execute("FROM kept").fetchall() == [(7,)]
        names = connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()
        assert ("large",) not in names
    with catalog.write() as connection:  # and it goes on once there is room
        connection.execute("INSERT INTO kept VALUES (8)")


def test_a_copy_that_does_not_fit_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(tmp_path)
    with catalog.write() as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS x")
    catalog.publish(force=True)
    with catalog.write() as connection:
        connection.execute("CREATE TABLE large AS SELECT random() AS x FROM range(2000000)")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(SnapshotError, match="readers keep the last one"):
            catalog.publish(force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [file.name for file in tmp_path.iterdir() if "draft" in file.name]
    assert catalog.query("FROM kept")[1] == [(7,)]


def test_the_lease_file_says_that_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteLeaseStore(tmp_path / "leases.sqlite")
    now = datetime(2026, 3, 1, tzinfo=UTC)
    lease = Lease("a", "d", "t", "L4 x1", Market.SPOT, 1.0, LeaseState.PLANNED, now)
    store.save(lease, now)
    connection = store._of_thread.opened[0]
    connection.execute("PRAGMA max_page_count = 1")  # SQLITE_FULL, as a disk without room gives

    def fill() -> None:
        for number in range(2000):
            store.save(Lease(f"{number}" * 20, *vars_of(lease)), now)

    def vars_of(one: Lease) -> tuple[object, ...]:
        return (one.domain, one.instance_type, one.node_class, one.market, 1.0, one.state, now)

    with pytest.raises(LeaseStoreError, match="no room left on the disk"):
        fill()
    assert sqlite3.connect(store.path).execute("SELECT count(*) FROM lease").fetchone()[0] >= 1

"""Open late, commit, close early: access to the one DuckDB file and its read-only snapshot.

DuckDB admits one writing process and a writer locks readers out, so the file is open only for
one read or one commit, under a file lock that all Coral processes of a home share. Everybody
else reads the snapshot, which is replaced as a whole and is never locked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING

import duckdb
from filelock import FileLock, Timeout

from catalog.errors import (
    DatabaseError,
    DatabaseLockedError,
    DiskFullError,
    QueryError,
    SnapshotError,
)
from catalog.migrations import migrate

if TYPE_CHECKING:
    import polars as pl

SNAPSHOT_EVERY_S = 30.0
LOCK_PATIENCE_S = 30.0
LOOK_S = 0.01  # at the lock: between two commits of a busy writer it is free for an instant
NO_ROOM_BYTES = 2**20
# What DuckDB raises on a file that opens but is damaged further in.
BROKEN_FILE = (duckdb.IOException, duckdb.FatalException, duckdb.SerializationException)


@dataclass(frozen=True)
class Catalog:
    """The database of one home folder."""

    home: Path
    patience_s: float = LOCK_PATIENCE_S

    @property
    def database(self) -> Path:
        return self.home / "coral.duckdb"

    @property
    def snapshot(self) -> Path:
        return self.home / "coral-snapshot.duckdb"

    @contextlib.contextmanager
    def write(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """One transaction on the migrated database; rolled back on any exception."""
        with self._open() as connection:
            connection.begin()
            try:
                yield connection
            except BaseException:
                connection.rollback()
                raise
            connection.commit()

    @contextlib.contextmanager
    def read(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """The live database, for one short read; take the rows and leave."""
        with self._open() as connection:
            yield connection

    def publish(self, *, force: bool = False) -> bool:
        """Replace the snapshot, at most every 30 s unless forced; True when it was."""
        if not force and self.snapshot.exists():
            age_s = time.time() - self.snapshot.stat().st_mtime
            if age_s < SNAPSHOT_EVERY_S:
                return False
        draft = self.home / ".snapshot-draft.duckdb"  # one at a time, under the lock
        with self._open() as connection:
            draft.unlink(missing_ok=True)
            live = connection.execute("SELECT current_database()").fetchall()[0][0]
            try:
                connection.execute(f"ATTACH '{str(draft).replace(chr(39), chr(39) * 2)}' AS draft")
                connection.execute(f'COPY FROM DATABASE "{live}" TO draft')
                connection.execute("DETACH draft")
                draft.replace(self.snapshot)
            except duckdb.Error as error:
                raise SnapshotError(
                    f"the snapshot could not be written in {self.home} ({_first_line(error)}); the "
                    "database is whole and readers keep the last one: is there room on the disk?"
                ) from error
            finally:  # nothing of it stays: it may be what fills the disk
                draft.unlink(missing_ok=True)
                draft.with_name(f"{draft.name}.wal").unlink(missing_ok=True)
        return True

    def query(
        self, sql: str, parameters: Sequence[object] = ()
    ) -> tuple[list[str], list[tuple[object, ...]]]:
        """Column names and rows of a query on the snapshot.

        Raises DatabaseError: no snapshot yet, or it is unreadable. QueryError: bad SQL.
        """
        with self._answering() as connection:
            result = connection.execute(sql, list(parameters))
            if result is None:  # DuckDB's answer to a query without a statement
                raise QueryError("SQL: the query is empty")
            columns = [column[0] for column in (result.description or [])]
            return columns, result.fetchall() if columns else []

    def frame(self, sql: str, parameters: Sequence[object] = ()) -> pl.DataFrame:
        """The same as a table. Raises as `query`."""
        with self._answering() as connection:
            asked = connection.sql(sql, params=list(parameters))
            if asked is None:
                raise QueryError("SQL: the query gives no rows to write")
            found: pl.DataFrame = asked.pl()
            return found

    @contextlib.contextmanager
    def _answering(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """The snapshot, for one query of a user's."""
        with self.read_snapshot() as connection:
            try:
                yield connection
            except (duckdb.IOException, duckdb.SerializationException) as error:
                raise DatabaseError(_unreadable(self.snapshot, error)) from error
            except duckdb.Error as error:
                raise QueryError(f"SQL: {_first_line(error)}") from error

    @contextlib.contextmanager
    def read_snapshot(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """The snapshot, which is never locked and may be half a minute old.

        Raises DatabaseError: there is none yet, or it is unreadable.
        """
        if not self.snapshot.exists():
            raise DatabaseError(
                f"no database in {self.home} yet; run `coral quickstart` first or name the "
                "right folder with --home"
            )
        try:
            connection = duckdb.connect(str(self.snapshot), read_only=True)
        except duckdb.Error as error:
            raise DatabaseError(_unreadable(self.snapshot, error)) from error
        with connection:
            yield connection

    @contextlib.contextmanager
    def _open(self) -> Iterator[duckdb.DuckDBPyConnection]:
        try:
            self.home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(
                f"cannot create the home folder {self.home}: {error.strerror}; choose another "
                "with --home or CORAL_HOME"
            ) from error
        try:
            with FileLock(self.home / "coral.lock").acquire(self.patience_s, LOOK_S):
                connection = self._connect()
                try:
                    self._migrate(connection)
                    yield connection
                except duckdb.Error as error:
                    if self._is_full(error):
                        raise DiskFullError(
                            f"no room left on the disk of {self.home}: what was to be written is "
                            "not, all from before is there; free some and run it again"
                        ) from error
                    if isinstance(error, BROKEN_FILE):
                        raise DatabaseError(_unreadable(self.database, error)) from error
                    raise
                finally:
                    connection.close()
        except (PermissionError, IsADirectoryError) as error:
            raise DatabaseError(
                f"cannot use {error.filename}: {error.strerror}; choose another home with --home"
            ) from error
        except Timeout as error:
            raise DatabaseLockedError(
                f"another Coral process has kept {self.database} busy for {self.patience_s:g} s; "
                "wait for it to end, or choose another home with --home"
            ) from error

    def _is_full(self, error: duckdb.Error) -> bool:
        """DuckDB says so of commits; of a copy it says only that something failed."""
        if any(said in str(error) for said in ("No space left", "File too large")):
            return True
        return isinstance(error, BROKEN_FILE) and disk_usage(self.home).free < NO_ROOM_BYTES

    def _migrate(self, connection: duckdb.DuckDBPyConnection) -> None:
        try:
            migrate(connection)
        except duckdb.CatalogException as error:  # somebody else's DuckDB file
            raise DatabaseError(_unreadable(self.database, error)) from error

    def _connect(self) -> duckdb.DuckDBPyConnection:
        """Connect, waiting out a foreign process (a DuckDB shell) that has the file open."""
        # Not at the top: readers of the snapshot never wait, and asyncio comes with it.
        from tenacity import RetryError, Retrying, retry_if_exception, stop_after_delay, wait_random

        try:
            for attempt in Retrying(
                retry=retry_if_exception(_is_lock),
                wait=wait_random(0.1, 0.5),
                stop=stop_after_delay(self.patience_s),
            ):
                with attempt:
                    return duckdb.connect(str(self.database))
        except RetryError as error:
            raise DatabaseLockedError(
                f"{self.database} is locked by another program; close it there (analysts can "
                f"read {self.snapshot.name} at any time), or choose another home with --home"
            ) from error
        except (duckdb.Error, OSError) as error:
            raise DatabaseError(_unreadable(self.database, error)) from error
        raise DatabaseError(f"{self.database} could not be opened")


def _is_lock(error: BaseException) -> bool:
    return isinstance(error, duckdb.IOException) and "Conflicting lock" in str(error)


def _unreadable(path: Path, error: BaseException) -> str:
    return (
        f"{path} is not a database that Coral can read ({_first_line(error)}); move it away to "
        "start anew, or choose another home with --home"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

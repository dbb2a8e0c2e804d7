"""What gateways wrote into the home's inbox, taken into the catalog."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import polars as pl
from filelock import FileLock

from catalog.observed import ObservedError, append_observed, checked_rows, kind_of, read_loaded
from catalog.store import Catalog
from executor.home import HomeFiles

BROKEN = "broken"  # folder of the inbox for files that are not what a gateway writes


@dataclass(frozen=True, slots=True)
class InboxRead:
    """What one look into the inbox came to."""

    files: int = 0  # new ones
    rows: int = 0
    broken: tuple[str, ...] = ()  # files set aside, each with the reason


def load_inbox(catalog: Catalog, now: datetime) -> InboxRead:
    """Take every file in once, then remove it; one that can't be read is set aside.

    Rows and the file's name are one transaction: killed anywhere, the next time goes on.
    """
    inbox = HomeFiles(catalog.home).inbox
    if not inbox.exists():
        return InboxRead()
    with FileLock(inbox / "lock"):
        return _load(catalog, inbox, sorted(inbox.glob("*.parquet")), now)


def _load(catalog: Catalog, inbox: Path, files: Sequence[Path], now: datetime) -> InboxRead:
    if not files:
        return InboxRead()
    with catalog.read() as connection:
        loaded = read_loaded(connection, [file.name for file in files])
    good: dict[Path, pl.DataFrame] = {}
    broken = []
    for file in files:
        if file.name in loaded:
            continue
        try:
            good[file] = checked_rows(pl.read_parquet(file), kind_of(file.name))
        except (ObservedError, pl.exceptions.PolarsError, OSError) as error:
            (inbox / BROKEN).mkdir(exist_ok=True)
            file.replace(inbox / BROKEN / file.name)
            broken.append(f"{file.name}: {str(error).splitlines()[0]}")
    if good:
        with catalog.write() as connection:
            for file, rows in good.items():
                append_observed(connection, file.name, rows, now)
    for file in files:
        file.unlink(missing_ok=True)
    return InboxRead(len(good), sum(rows.height for rows in good.values()), tuple(broken))

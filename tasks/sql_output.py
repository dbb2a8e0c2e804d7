"""The answer to a user's SQL as CSV, JSON or Parquet, on standard output or in a file."""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl

from catalog.store import Catalog
from planner.errors import InputError

FORMATS = ("csv", "json", "parquet")


class OutputError(InputError):
    """The answer cannot be written so, or there."""


def write_answer(catalog: Catalog, query: str, form: str, output: Path | None) -> int:
    """Write it, whole or not at all; how many rows it has.

    Raises OutputError: no such format, Parquet without a file, a file that cannot be written.
    QueryError, DatabaseError: as `Catalog.query`.
    """
    if form not in FORMATS:
        raise OutputError(
            f"unknown format {form!r} for an answer in a file: {', '.join(FORMATS)}"
            if output is not None
            else f"unknown format {form!r}: table, {', '.join(FORMATS)}"
        )
    if output is None:
        if form == "parquet":
            raise OutputError("Parquet is no text: name a file with --output")
        found = catalog.frame(query)
        sys.stdout.write(_text(found, form))
        return found.height
    found = catalog.frame(query)
    draft = output.with_name(f".{output.name}.draft")
    try:
        if form == "parquet":
            found.write_parquet(draft)
        else:
            draft.write_text(_text(found, form))
        draft.replace(output)
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
    return found.height


def _text(found: pl.DataFrame, form: str) -> str:
    if form == "json":
        return f"{found.write_json()}\n"
    nested = [name for name, kind in found.schema.items() if kind.is_nested()]
    if nested:
        raise OutputError(
            f"{', '.join(nested)} of the answer is a list or structure, which CSV cannot hold; "
            "choose --format json or parquet"
        )
    return found.write_csv()

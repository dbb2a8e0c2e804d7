"""How commands run flows quietly and answer, as people read it or as one JSON object."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import typer

from executor.logs import FORMAT, log_to_stderr

Result = TypeVar("Result")


@contextlib.contextmanager
def flow_run() -> Iterator[None]:
    """Run a flow quietly, with a progress bar on a terminal."""
    # Prefect and Dask log every start and stop; errors reach the user as one sentence instead.
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_LOGGING_ROOT_LEVEL", "CRITICAL")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    if os.environ.get(FORMAT) == "json":
        log_to_stderr("coral")
    from coral.progress import progress_bars

    try:
        with progress_bars():
            yield
    except RuntimeError as error:
        if "Failed to reach API" not in str(error):
            raise
        from tasks.alerts import ServerAwayError
        from tasks.recording import server_url

        raise ServerAwayError(
            f"the Prefect server at {server_url()} does not answer; start it, or unset "
            "PREFECT_API_URL to run without one"
        ) from error


def answer(
    result: Result,
    as_json: bool,
    as_object: Callable[[Result], dict[str, Any]],
    show: Callable[[Result], None],
) -> None:
    """A result as one JSON object, or as people read it."""
    if as_json:
        print_json(as_object(result))
    else:
        show(result)


def answer_rows(columns: list[str], rows: list[tuple[object, ...]], as_json: bool) -> None:
    """A table as one JSON object, or as people read it."""
    from coral.console import print_rows

    if as_json:
        print_json({"columns": columns, "rows": [list(row) for row in rows]})
    else:
        print_rows(columns, rows)


def print_json(value: dict[str, Any]) -> None:
    """One line."""
    typer.echo(json.dumps(_plain(value), default=str, allow_nan=False))


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

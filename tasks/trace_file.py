"""Request traces in files: CSV or Parquet, one row per request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from planner.types import Workload
from simulator.errors import TraceError
from simulator.streams import Stream
from simulator.trace import Trace, trace_of_rows

NUMBERS = ("timestamp_s", "input_tokens", "output_tokens")
COLUMNS = ("timestamp_s", "model", "input_tokens", "output_tokens")


def read_trace_file(path: Path, workloads: Sequence[Workload]) -> Trace:
    """Requests of a file; `model` names a model or a workload of the scenario.

    Raises TraceError: the file cannot be read, lacks columns, has gaps or text for numbers, is out
    of order or has negative lengths. UnknownNameError: a model that the scenario lacks.
    """
    frame = _checked(path, COLUMNS)
    stream = _stream(frame)
    return trace_of_rows(
        workloads,
        stream.at_s,
        [str(name) for name in frame["model"].to_list()],
        stream.input_tokens,
        stream.output_tokens,
    )


def read_stream_file(path: Path) -> Stream:
    """Requests of a file for one workload, which needs no column `model`. Raises TraceError."""
    stream = _stream(_checked(path, NUMBERS))
    place = stream.input_tokens * 0
    Trace(("",), stream.at_s, place, stream.input_tokens, stream.output_tokens)  # refuses nonsense
    return stream


def _stream(frame: pl.DataFrame) -> Stream:
    return Stream(
        frame["timestamp_s"].cast(pl.Float64).to_numpy(),
        frame["input_tokens"].to_numpy().astype(np.int64),
        frame["output_tokens"].to_numpy().astype(np.int64),
    )


def _checked(path: Path, columns: Sequence[str]) -> pl.DataFrame:
    frame = _read(path)
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise TraceError(
            f"{path}: no column {', '.join(missing)}; a trace has {', '.join(columns)}"
        )
    for name in columns:
        column = frame[name]
        if column.null_count():
            row = int(column.is_null().arg_true()[0]) + 1
            raise TraceError(f"{path}: request {row} has no {name}; fill the gap or leave it out")
        if name in NUMBERS and not column.dtype.is_numeric():
            raise TraceError(f"{path}: column {name} has values that are not numbers")
    return frame


def _read(path: Path) -> pl.DataFrame:
    if not path.is_file():
        raise TraceError(f"no trace file {path}")
    try:
        if path.suffix == ".parquet":
            return pl.read_parquet(path)
        return pl.read_csv(path, infer_schema_length=None)
    except (pl.exceptions.PolarsError, OSError) as error:
        first = str(error).splitlines()[0]
        raise TraceError(f"{path} cannot be read as a trace: {first}") from error

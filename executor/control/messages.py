"""What agents and the controller say to each other: JSON objects with a `kind`.

From a node that has no keys known yet, where nodes enrol: `enrol`; to it: `enrolled`, `refused`.
From an agent: `hello` (it is there), `report` (its replicas' processes, and what the cloud said of
the node's end), `log` (lines asked for).
From a gateway: `gateway` (it is there, and has such routes); to it: `routes`.
To an agent: `start`, `stop`, `log`, `renew` (the lease goes on for so long), `leave` (stop all and
end).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from executor.control.notices import REBALANCE, SPOT, Notice
from executor.stage_plan import ProcessPlan
from planner.errors import CoralError

LARGEST_BYTES = 4 * 2**20


class WireError(CoralError):
    """A message that is not one of these."""


class ProcessState(StrEnum):
    """Of one process of a replica."""

    RUNNING = "running"
    EXITED = "exited"  # by itself: its replica has failed
    STOPPED = "stopped"  # as asked


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """One process as its node's agent sees it."""

    replica_id: str
    digest: str  # of the replica's plan that it was started from
    generation: int  # counts the replica's starts
    name: str
    state: ProcessState
    pid: int | None
    exit_code: int | None
    prepared_s: float | None = None  # that preparing took, once it is done


def encode(kind: str, **fields: Any) -> bytes:
    """One message."""
    return json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()


def decode(data: bytes) -> Mapping[str, Any]:
    """One message.

    Raises WireError: too large, not JSON, not an object, or without a kind.
    """
    if len(data) > LARGEST_BYTES:
        raise WireError(f"a message of {len(data)} bytes; at most {LARGEST_BYTES}")
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message that is not JSON: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise WireError("a message without a kind")
    return message


def encode_processes(processes: Sequence[ProcessPlan]) -> list[dict[str, Any]]:
    """Process plans as JSON values."""
    return [{**asdict(process), "environment": dict(process.environment)} for process in processes]


def decode_processes(values: Any) -> tuple[ProcessPlan, ...]:
    """Process plans from JSON values.

    Raises WireError: a field is missing or of another kind.
    """
    try:
        return tuple(
            ProcessPlan(
                name=str(value["name"]),
                lease_id=str(value["lease_id"]),
                argv=tuple(map(str, value["argv"])),
                environment={str(k): str(v) for k, v in value["environment"].items()},
                api_url=value["api_url"],
                prepare=tuple(map(str, value.get("prepare", ()))),
            )
            for value in values
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise WireError(f"a process plan that is not one: {error!r}") from error


def decode_reports(values: Any) -> tuple[ProcessReport, ...]:
    """Process reports from JSON values.

    Raises WireError: a field is missing or of another kind.
    """
    try:
        return tuple(
            ProcessReport(
                replica_id=str(value["replica_id"]),
                digest=str(value["digest"]),
                generation=int(value["generation"]),
                name=str(value["name"]),
                state=ProcessState(value["state"]),
                pid=value["pid"],
                exit_code=value["exit_code"],
                prepared_s=seconds_of(value.get("prepared_s")),
            )
            for value in values
        )
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise WireError(f"a process report that is not one: {error!r}") from error


def seconds_of(value: Any) -> float | None:
    """A number, or none.

    Raises TypeError, ValueError, OverflowError: neither.
    """
    if value is None:
        return None
    if not math.isfinite(found := float(value)):
        raise ValueError(f"{value!r} seconds")
    return found


def decode_notice(value: Any) -> Notice | None:
    """A notice from a JSON value.

    Raises WireError: a field is missing or of another kind.
    """
    if value is None:
        return None
    try:
        kind = str(value["kind"])
        if kind not in {SPOT, REBALANCE}:
            raise ValueError(kind)
        at = datetime.fromisoformat(value["at"])
        if at.tzinfo is None:
            raise ValueError(f"{value['at']} is of no time zone")
        return Notice(kind, at)
    except (TypeError, KeyError, ValueError) as error:
        raise WireError(f"a notice that is not one: {error!r}") from error

"""Nodes that come without keys: what they say, and whether they may come in.

A node makes its CURVE pair itself and asks, over a connection that proves that it holds the pair,
to be the node of a lease. It is let in where three things agree: the lease is awaited and has no
key yet, the ticket is the lease's, and the connection comes from an address that the cloud says is
of the lease's instance. Threats and what is left of them: docs/operations.md, Nodes of a cloud.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.control.messages import WireError, seconds_of
from planner.catch_up import Instance

TICKET_BYTES = 16
SECRET_FILE = "enrol.secret"
LONGEST = 200  # characters of a field


@dataclass(frozen=True, slots=True)
class Claim:
    """One node's request to come in."""

    route: bytes  # of its connection
    public_key: str  # of the connection
    address: str  # of its other end
    lease_id: str
    ticket: str
    began: float | None = None  # seconds since 1970, by the node's clock: its user data
    installed: float | None = None


def decode_claim(route: bytes, key: str, address: str, message: Mapping[str, Any]) -> Claim:
    """From a message and what is known of its connection.

    Anybody may send it, so nothing in it may end the controller. Raises WireError: it is none.
    """
    if message["kind"] != "enrol":
        raise WireError(f"unknown kind {message['kind']!r}")
    lease_id, ticket = str(message.get("lease_id", "")), str(message.get("ticket", ""))
    if max(len(lease_id), len(ticket)) > LONGEST:
        raise WireError("a field that is too long")
    try:
        (lease_id + ticket).encode()  # half a character (\ud800) cannot be written
        times = [seconds_of(message.get(name)) for name in ("began", "installed")]
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"enrol: {error!r}") from error
    return Claim(route, key, address, lease_id, ticket, *times)


def ticket_of(keys: Path, lease_id: str) -> str:
    """The lease's, the same each time; only this home can make it."""
    digest = hmac.new(_secret(keys), lease_id.encode(), hashlib.sha256).digest()
    return digest[:TICKET_BYTES].hex()


def is_ticket(keys: Path, claim: Claim) -> bool:
    """Whether a claim has its lease's."""
    return hmac.compare_digest(ticket_of(keys, claim.lease_id).encode(), claim.ticket.encode())


def instance_of(claim: Claim, instances: Sequence[Instance]) -> Instance | str:
    """Which of the lease's instances asks, or why none of them can be it."""
    alive = [one for one in instances if one.lease_id == claim.lease_id and one.state.lives]
    if not alive:
        return f"the cloud lists no instance that lives for lease {claim.lease_id}"
    for one in alive:
        if claim.address in one.addresses:
            return one
    there = ", ".join(address for one in alive for address in one.addresses) or "none"
    return f"it asks from {claim.address}, and its lease's instance has {there}"


def _secret(keys: Path) -> bytes:
    """Made once, also where a round's launches and the controller ask for it at the same time."""
    path = keys / SECRET_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, draft = tempfile.mkstemp(dir=keys, prefix="enrol.")  # for its owner alone
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # the first one wins
        Path(draft).unlink()
    return path.read_bytes()

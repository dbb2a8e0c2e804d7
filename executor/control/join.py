"""A node's side of enrolment: asks to be the node of its lease until it is let in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from executor.control.keys import KeyPair
from executor.control.messages import WireError, decode, encode
from planner.errors import CoralError

ASK_EVERY_S = 3.0
PATIENCE_S = 900.0  # of a node that nobody lets in; it bills meanwhile

log = logging.getLogger(__name__)


class NotAdmittedError(CoralError):
    """The controller did not let the node in."""


@dataclass(frozen=True, slots=True)
class Joining:
    """What the node was told, and when what began (seconds since 1970)."""

    address: str  # where nodes enrol
    controller_key: str
    lease_id: str
    ticket: str
    began: float | None = None
    installed: float | None = None


def join(
    joining: Joining,
    keys: KeyPair,
    patience_s: float = PATIENCE_S,
    ask_every_s: float = ASK_EVERY_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return once the controller knows the keys.

    Raises NotAdmittedError: it did not let the node in within the patience, with what it said.
    """
    ends, said = clock() + patience_s, "it did not answer"
    question = encode(
        "enrol", lease_id=joining.lease_id, ticket=joining.ticket, began=joining.began,
        installed=joining.installed,
    )  # fmt: skip
    with zmq.Context() as context:
        while clock() < ends:
            with context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                socket.curve_serverkey = joining.controller_key.encode("ascii")
                socket.curve_publickey = keys.public.encode("ascii")
                socket.curve_secretkey = keys.secret.encode("ascii")
                socket.connect(joining.address)
                socket.send(question)
                asked = clock()
                if socket.poll(int(1000 * ask_every_s)):
                    answer = _answer(socket.recv())
                    if answer is None:
                        return
                    if answer != said:
                        log.warning("not let in yet: %s", answer)
                    said = answer
                    time.sleep(max(0.0, ask_every_s - (clock() - asked)))
    raise NotAdmittedError(
        f"the controller at {joining.address} did not let this node in for {patience_s:.0f} s: "
        f"{said}"
    )


def _answer(data: bytes) -> str | None:
    """Why the node is not let in; None: it is."""
    try:
        message = decode(data)
    except WireError as error:
        return str(error)
    return None if message["kind"] == "enrolled" else str(message.get("why", message["kind"]))

"""What travels between head and workers: commands and replies over ZeroMQ.

With CURVE keys where machines are apart: nobody without the pipeline's own is let in.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle
import zmq
from zmq.auth.thread import ThreadAuthenticator


@dataclass(frozen=True)
class OwnKey:
    """Lets in who has the one pair of keys."""

    public: str

    def callback(self, domain: str, key: bytes) -> bool:
        return key.decode("ascii") == self.public


class Sockets:
    """Of one process, with one pair of keys for all."""

    def __init__(self, public_key: str = "", secret_key: str = "") -> None:
        self.public, self.secret = public_key.encode(), secret_key.encode()
        self.context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None

    def bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        found = self._socket(kind)
        if self.public:
            self._let_in()
            found.curve_server = True
            found.curve_secretkey, found.curve_publickey = self.secret, self.public
        found.bind(address)
        return found

    def connect(self, kind: int, address: str, identity: str = "") -> zmq.Socket[bytes]:
        found = self._socket(kind)
        if identity:
            found.identity = identity.encode()
        if self.public:
            found.curve_serverkey = self.public
            found.curve_secretkey, found.curve_publickey = self.secret, self.public
        found.connect(address)
        return found

    def _let_in(self) -> None:
        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(self.context)
            self._authenticator.start()
            own = OwnKey(self.public.decode())
            self._authenticator.configure_curve_callback(credentials_provider=own)

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self.context.destroy(linger=0)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        found = self.context.socket(kind)
        found.setsockopt(zmq.SNDHWM, 0)
        found.setsockopt(zmq.RCVHWM, 0)
        found.setsockopt(zmq.LINGER, 0)
        return found


def identity(stage: int, node: int, rank: int) -> str:
    """A worker's name."""
    return f"stage{stage}-node{node}-rank{rank}"


def pack(value: Any) -> bytes:
    """Of what this pipeline's own processes send each other, and nobody else can."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):  # functions and local classes
        return bytes(cloudpickle.dumps(value))


def unpack(data: bytes) -> Any:
    return pickle.loads(data)

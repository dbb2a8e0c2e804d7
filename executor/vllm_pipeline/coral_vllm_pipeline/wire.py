"""What travels: commands and replies between head and workers, hidden states between stages.

ZeroMQ, with CURVE keys where machines are apart. Hidden states go from a node's first worker
straight to every worker of the next stage's node that has the request, as rows of bytes tagged with
the step.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import zmq

from .layout import Layout

Rows = dict[str, dict[str, Any]]  # by request, by name: a tensor (tokens, hidden)


@dataclass
class Sockets:
    """Of one process."""

    layout: Layout

    def __post_init__(self) -> None:
        self.context = zmq.Context()

    def bind(self, kind: int, address: str) -> zmq.Socket[bytes]:
        found = self._socket(kind)
        if self.layout.public_key:
            found.curve_server = True
            found.curve_secretkey = self.layout.secret_key.encode()
            found.curve_publickey = self.layout.public_key.encode()
        found.bind(address)
        return found

    def connect(self, kind: int, address: str, identity: str = "") -> zmq.Socket[bytes]:
        found = self._socket(kind)
        if identity:
            found.identity = identity.encode()
        if self.layout.public_key:
            found.curve_serverkey = self.layout.public_key.encode()
            found.curve_publickey = self.layout.public_key.encode()
            found.curve_secretkey = self.layout.secret_key.encode()
        found.connect(address)
        return found

    def close(self) -> None:
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
    return bytes(cloudpickle.dumps(value))


def unpack(data: bytes) -> Any:
    return pickle.loads(data)


def pack_rows(step: int, rows: Mapping[str, Mapping[str, Any]]) -> list[bytes]:
    """Rows of several requests as one message: a header, and a frame of bytes for every tensor."""
    import torch

    header, frames = [], []
    for request, tensors in rows.items():
        for name, tensor in tensors.items():
            whole = tensor.detach().contiguous().cpu()
            header.append((request, name, tuple(whole.shape), str(whole.dtype).split(".")[1]))
            frames.append(whole.view(torch.uint8).numpy().tobytes())
    return [pickle.dumps((step, header)), *frames]


def unpack_rows(message: Sequence[bytes]) -> tuple[int, Rows]:
    """The step, and the rows by request."""
    import torch

    step, header = pickle.loads(message[0])
    found: Rows = {}
    for (request, name, shape, kind), frame in zip(header, message[1:], strict=True):
        flat = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        found.setdefault(request, {})[name] = flat.view(getattr(torch, kind)).view(shape)
    return step, found

"""How hidden states go from stage to stage: one interface, over ZeroMQ or torch.distributed.

Of a step a node's first worker sends one tensor to every worker of each next node that has some of
its requests: the rows of those requests, in the scheduler's order. Both sides know who sends how
many rows, so that nothing but numbers travels. Between two nodes tensors come in the order of the
steps.
"""

from __future__ import annotations

import struct
import warnings
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import zmq

from . import PipelineError
from .layout import Layout
from .wire import Sockets

HEADER = struct.Struct("<qq")  # step, node it comes from
LOST_S = 120.0  # torch.distributed: for what never comes; the head sees a lost worker at once

warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is only read

Place = tuple[int, int, int]  # stage, node, rank


class Transport(Protocol):
    """Of one worker."""

    def send(self, step: int, node: int, rows: torch.Tensor) -> None:
        """To every worker of a node of the next stage."""

    def receive(self, step: int, node: int, empty: torch.Tensor) -> torch.Tensor:
        """What a node of the stage before sent; `empty` has its shape and type, and may be used."""


class ZeroMq:
    """Encrypted where the layout has keys; tensors pass through the host's memory."""

    def __init__(self, layout: Layout, place: Place) -> None:
        self.layout, (self.stage, self.node, rank) = layout, place
        self.sockets = Sockets(layout.public_key, layout.secret_key)
        mine = layout.stages[self.stage].nodes[self.node]
        self.hidden = self.sockets.bind(zmq.PULL, mine.hidden(rank)) if self.stage else None
        self.next: dict[int, list[zmq.Socket[bytes]]] = {}
        self.came: dict[tuple[int, int], Any] = {}  # frames by step and node

    def send(self, step: int, node: int, rows: torch.Tensor) -> None:
        header = HEADER.pack(step, self.node)
        data = rows.detach().contiguous().cpu().view(torch.uint8).numpy()
        for socket in self._to(node):
            socket.send(header, zmq.SNDMORE)
            socket.send(data, copy=False)

    def receive(self, step: int, node: int, empty: torch.Tensor) -> torch.Tensor:
        if self.hidden is None:
            raise PipelineError("nothing comes to the first stage")
        while (step, node) not in self.came:
            header, frame = self.hidden.recv_multipart(copy=False)
            self.came[HEADER.unpack(header.bytes)] = frame
        frame = self.came.pop((step, node))
        flat = torch.frombuffer(frame.buffer, dtype=empty.dtype)
        return flat.view(empty.shape)

    def _to(self, node: int) -> list[zmq.Socket[bytes]]:
        if node not in self.next:
            there = self.layout.stages[self.stage + 1].nodes[node]
            self.next[node] = [
                self.sockets.connect(zmq.PUSH, there.hidden(rank))
                for rank in range(there.tensor_parallel_size)
            ]
        return self.next[node]


class TorchDistributed:
    """A process group of all workers: gloo on CPUs, NCCL between GPUs. Nothing is encrypted."""

    def __init__(self, layout: Layout, place: Place) -> None:
        import torch.distributed as dist

        self.layout, (self.stage, _, _) = layout, place
        self.ranks = {there: rank for rank, there in enumerate(layout.places)}
        rank, size = self.ranks[place], len(self.ranks)
        host, port = layout.rendezvous
        wait = timedelta(seconds=LOST_S)
        store = dist.TCPStore(host, port, size, rank == 0, wait)
        kind = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}[layout.transport]
        self.group = getattr(dist, kind)(store, rank, size, wait)
        self.on_its_way: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, step: int, node: int, rows: torch.Tensor) -> None:
        data = rows.detach().contiguous()
        for rank in range(self.layout.stages[self.stage + 1].nodes[node].tensor_parallel_size):
            work = self.group.send([data], self.ranks[self.stage + 1, node, rank], 0)
            self.on_its_way.append((work, data))
        while self.on_its_way and self.on_its_way[0][0].is_completed():
            self.on_its_way.popleft()

    def receive(self, step: int, node: int, empty: torch.Tensor) -> torch.Tensor:
        self.group.recv([empty], self.ranks[self.stage - 1, node, 0], 0).wait()
        return empty


def make_transport(layout: Layout, place: Place) -> Transport:
    """As the layout names it."""
    kinds: dict[str, Callable[[Layout, Place], Transport]] = {
        "zmq": ZeroMq, "gloo": TorchDistributed, "nccl": TorchDistributed
    }  # fmt: skip
    return kinds[layout.transport](layout, place)

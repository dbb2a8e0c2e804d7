"""KV of finished prompts, given from prefill to decode workers: by layer range and by heads.

A prefill worker keeps what it computed of a prompt in the host's memory until decode workers have
taken all of it, or too long. A decode worker asks every prefill worker that has some of its own
layers and heads; so stages may be cut elsewhere, and tensor parallel sizes may differ. Whole blocks
travel: how a block holds its tokens is the attention's own affair. Pure of vLLM.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq

from . import PipelineError
from .parts import Part, Source, wishes
from .wire import Sockets

KEPT_S = 120.0  # for a decode replica that never comes
USABLE_S = 60.0  # what a decode replica has fetched: a request that waits longer is computed anew
KEPT_BYTES = 8 * 2**30  # of one worker at most; then the oldest goes
HOST_SHARE = 0.25  # of a machine's memory, for all its workers: the rest is the engines' own
TIDY_MS = 1000  # between looks for what nobody came for
FETCH_S = 20.0  # for one worker's part; then the decode side computes the prompt itself
LATE_S = 5.0  # for a rank that is still copying when another's token is out already
LOOK_AGAIN_MS = 5  # whether it is there now


Kv = dict[int, torch.Tensor]  # by layer: (heads, blocks, tokens of a block, content)


def room_bytes(workers: int) -> int:
    """For one of so many workers of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(KEPT_BYTES, int(HOST_SHARE * memory / max(1, workers)))


@dataclass
class Kept:
    """One prompt's KV on one worker."""

    kv: Kv
    at: float
    bytes: int
    taken: float = 0.0  # share that was taken for good


@dataclass
class Store:
    """Prompts whose KV waits to be taken."""

    part: Part
    room_bytes: int = KEPT_BYTES
    kept: OrderedDict[str, Kept] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, request: str, kv: Kv) -> None:
        """Take over; the oldest go where there is no room, or nobody came for them."""
        size = sum(one.nbytes for one in kv.values())
        with self.lock:
            self.kept[request] = Kept(kv, time.monotonic(), size)
            self._drop()

    def tidy(self) -> None:
        """Drop what nobody came for: no other prompt may come that would."""
        with self.lock:
            self._drop()

    def has(self, request: str) -> bool:
        with self.lock:
            return request in self.kept

    def take(self, request: str, part: Part, share: float) -> list[torch.Tensor]:
        """The part's heads of each of its layers, all of which must be here.

        `share` is how much of this request's worth on this worker is taken by that: what is taken
        whole is forgotten. Raises PipelineError: it is not here, or no more.
        """
        with self.lock:
            if request not in self.kept:
                raise PipelineError(f"KV of request {request} is not here, or no more")
            kept = self.kept[request]
            first = part.first_head - self.part.first_head
            found = [kept.kv[layer][first : first + part.heads] for layer in part.layers]
            kept.taken += share
            if kept.taken > 1.0 - 1e-6:
                del self.kept[request]
        return found

    def _drop(self) -> None:
        while self.kept and (self._is_old() or self._is_full()):
            self.kept.popitem(last=False)

    def _is_old(self) -> bool:
        return time.monotonic() - next(iter(self.kept.values())).at > KEPT_S

    def _is_full(self) -> bool:
        return len(self.kept) > 1 and sum(one.bytes for one in self.kept.values()) > self.room_bytes


class Giver:
    """Answers decode workers, in a thread; who asks too early holds up nobody else.

    The same thread tidies: the store, and what its worker has beside.
    """

    def __init__(
        self, sockets: Sockets, address: str, store: Store, tidy: Callable[[], None] = lambda: None
    ) -> None:
        self.socket, self.store, self.tidy = sockets.bind(zmq.ROUTER, address), store, tidy
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        early: list[tuple[bytes, bytes, float]] = []
        while True:
            self.store.tidy()
            self.tidy()
            if self.socket.poll(LOOK_AGAIN_MS if early else TIDY_MS):
                who, asked = self.socket.recv_multipart()
                early.append((who, asked, time.monotonic()))
            early = [one for one in early if not self._answer(*one)]

    def _answer(self, who: bytes, asked: bytes, since: float) -> bool:
        """Whether it is answered; not yet where the KV may still come."""
        try:
            request, part, share = pickle.loads(asked)
            if not self.store.has(request) and time.monotonic() - since < LATE_S:
                return False
            answer = pack_kv(self.store.take(request, part, share))
        except Exception as error:  # of whatever kind: the decode side computes it itself
            answer = [b"", str(error).encode()]
        self.socket.send_multipart([who, *answer], copy=False)
        return True


def pack_kv(kv: Sequence[torch.Tensor]) -> list[Any]:
    """Shape and type, then every layer's bytes."""
    first = kv[0]
    header = pickle.dumps((tuple(first.shape), str(first.dtype).split(".")[1]))
    return [header, *(one.view(torch.uint8).numpy() for one in kv)]


def unpack_kv(frames: Sequence[Any]) -> list[torch.Tensor]:
    """Raises PipelineError: the other side says why it has none."""
    if not frames[0].bytes:
        raise PipelineError(frames[1].bytes.decode())
    shape, kind = pickle.loads(frames[0].bytes)
    dtype = getattr(torch, kind)
    return [torch.frombuffer(frame.buffer, dtype=dtype).view(shape) for frame in frames[1:]]


def fetch(
    sockets: Sockets,
    request: str,
    mine: Part,
    replicas: int,
    sources: Sequence[Source],
) -> Kv:
    """This worker's layers and heads of a prompt.

    Raises PipelineError: some worker does not answer, or has it no more, or nobody has a layer.
    """
    asked, found = [], dict[int, torch.Tensor]()
    try:
        for wish in wishes(mine, replicas, sources):
            socket = sockets.connect(zmq.DEALER, wish.source.address)
            asked.append((socket, wish.part))
            socket.send(pickle.dumps((request, wish.part, wish.share)))
        for socket, part in asked:
            if not socket.poll(int(1000 * FETCH_S)):
                raise PipelineError(f"no answer with the KV of request {request}")
            frames = socket.recv_multipart(copy=False)
            for layer, came in zip(part.layers, unpack_kv(frames), strict=True):
                if layer not in found:
                    found[layer] = torch.empty((mine.heads, *came.shape[1:]), dtype=came.dtype)
                first = part.first_head - mine.first_head
                found[layer][first : first + part.heads] = came
    finally:
        for socket, _ in asked:
            socket.close()
    return found

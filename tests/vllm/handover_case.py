"""Runs in vLLM's environment: a worker that is asked for KV which is not there yet, or never is."""

from __future__ import annotations

import pickle
import time

import torch
import zmq
from coral_vllm_pipeline import PipelineError, handover
from coral_vllm_pipeline.handover import LATE_S, Giver, Store, fetch
from coral_vllm_pipeline.parts import Part, Source
from coral_vllm_pipeline.wire import Sockets

PART = Part((0, 1), 0, 2)


def main() -> None:
    """Raises what goes wrong."""
    sockets, store = Sockets(), Store(PART)
    giver = Giver(sockets, "tcp://127.0.0.1:*", store)
    source = Source(giver.socket.getsockopt_string(zmq.LAST_ENDPOINT), PART)
    kv = {layer: torch.arange(24.0).view(2, 3, 2, 2) + layer for layer in PART.layers}

    never = sockets.connect(zmq.DEALER, source.address)
    never.send(pickle.dumps(("never", PART, 1.0)))
    never.send(b"no pickle")
    began = time.monotonic()
    store.keep("there", kv)
    found = fetch(sockets, "there", PART, 1, [source])
    require(all(torch.equal(found[layer], kv[layer]) for layer in PART.layers), "other values")
    require(time.monotonic() - began < LATE_S / 2, "one that never comes held up another")
    require(not store.has("there"), "what was taken whole stays")
    try:
        fetch(sockets, "never", PART, 1, [source])
    except PipelineError as error:
        require("not here" in str(error), str(error))
    else:
        raise RuntimeError("KV of a request that nobody computed")
    require(time.monotonic() - began > LATE_S, "it was not waited for")

    handover.KEPT_S, ends = 0.5, time.monotonic() + 10.0
    store.keep("left", kv)
    while store.has("left") and time.monotonic() < ends:
        time.sleep(0.05)
    require(not store.has("left"), "what nobody came for stays until the next prompt")
    small = Store(PART, room_bytes=300)  # a prompt has 192 bytes
    for name in ("first", "second"):
        small.keep(name, kv)
    require(small.has("second") and not small.has("first"), "more is kept than there is room")
    require(handover.room_bytes(10**6) < 2**30, "the room is not the machine's")
    print("right")


def require(holds: bool, why: str) -> None:
    if not holds:
        raise RuntimeError(why)


if __name__ == "__main__":
    main()

"""Who gives which part of a prompt's KV to whom, and who is let in: without vLLM."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import zmq
from coral_vllm_pipeline import PipelineError
from coral_vllm_pipeline.parts import (
    Part,
    Source,
    heads_of_rank,
    sources_from_json,
    sources_to_json,
    wishes,
)
from coral_vllm_pipeline.wire import Sockets
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.pipeline_plan import derived_keys


def replica(layers: int, heads: int, cuts: list[int], widths: list[int]) -> list[Part]:
    """All workers of stages cut there."""
    found, ends = [], [0, *cuts, layers]
    for (first, end), tp in zip(itertools.pairwise(ends), widths, strict=True):
        for rank in range(tp):
            found.append(Part(tuple(range(first, end)), *heads_of_rank(heads, tp, rank)))
    return found


@settings(max_examples=80)
@given(st.integers(0, 10_000))
def test_every_worker_gets_its_layers_and_heads_once(seed: int) -> None:
    rng = random.Random(seed)
    layers, heads = rng.randint(2, 12), rng.choice([1, 2, 4, 8])

    def cut() -> list[Part]:
        cuts = sorted(rng.sample(range(1, layers), rng.randint(0, min(3, layers - 1))))
        return replica(layers, heads, cuts, [rng.choice([1, 2, 4, 8]) for _ in (*cuts, 0)])

    prefill, decode = cut(), cut()
    sources = [Source(f"tcp://h:{n}", part) for n, part in enumerate(prefill)]
    assert sources_from_json(sources_to_json(sources)) == sources
    taken = dict.fromkeys((source.address for source in sources), 0.0)
    for mine in decode:
        replicas = sum(mine == other for other in decode)
        got = []
        for wish in wishes(mine, replicas, sources):
            part = wish.part
            assert set(part.layers) <= set(wish.source.part.layers)
            got += [(x, part.first_head + k) for x in part.layers for k in range(part.heads)]
            taken[wish.source.address] += wish.share
        assert sorted(got) == [
            (x, mine.first_head + k) for x in mine.layers for k in range(mine.heads)
        ]
    for source in sources:  # of ranks with the same heads one is asked, and gives all
        same = sum(taken[s.address] for s in sources if s.part == source.part)
        assert same == pytest.approx(1.0)


def test_a_layer_that_nobody_has_is_said() -> None:
    sources = [Source("tcp://h:1", Part((0, 1), 0, 2))]
    with pytest.raises(PipelineError, match="nobody has layer 2"):
        wishes(Part((1, 2), 0, 2), 1, sources)


GOOD = {"address": "x", "layers": [0, 1], "heads": [0, 1]}


@pytest.mark.parametrize(
    "values",
    [
        None, 1, "x", [{}], [{"a": 1}], [GOOD, {**GOOD, "layers": [1]}],
        [{**GOOD, "layers": [0, 10**12]}], [{**GOOD, "heads": [0, 0]}],
        [{**GOOD, "heads": [-1, 1]}], [{**GOOD, "layers": [0, float("inf")]}],
    ],
)  # fmt: skip
def test_what_names_no_sources_is_refused(values: object) -> None:
    assert sources_from_json([GOOD])
    with pytest.raises(PipelineError, match="no sources of KV"):
        sources_from_json(values)


def test_who_has_other_keys_is_not_let_in() -> None:
    own, other = derived_keys("secret", "a"), derived_keys("secret", "b")
    head = Sockets(own.public, own.secret)
    socket = head.bind(zmq.PULL, "tcp://127.0.0.1:*")
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    stranger, friend = Sockets(), Sockets(own.public, own.secret)
    forger = Sockets(other.public, other.secret)
    try:
        plain = stranger.connect(zmq.PUSH, address)
        plain.send(b"stranger")
        forged = forger.context.socket(zmq.PUSH)  # knows the head's key, has another of its own
        forged.curve_serverkey = own.public.encode()
        forged.curve_publickey, forged.curve_secretkey = (
            other.public.encode(),
            other.secret.encode(),
        )
        forged.connect(address)
        forged.send(b"forger")
        time.sleep(0.2)
        known = friend.connect(zmq.PUSH, address)
        known.send(b"friend")
        assert socket.poll(5000) and socket.recv() == b"friend"
        assert not socket.poll(300)
    finally:
        for one in (stranger, forger, friend, head):
            one.close()

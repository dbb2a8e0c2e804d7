"""Machines that batch on their own, as Helix's workers do.

Coral's engines move micro-batches through their stages in step. Helix's machines do not: each takes
what lies in its queue, prompts first as far as its limits admit, else all decodes, and hands every
token on to the next machine of its request's path; a machine may be entered at any of its layers.
Layouts with several machines per range of layers, and those in which machines share parts of their
layers, need that. A plain event simulation of them for `bench.helix_runs`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from planner.baselines.helix_flow import SINK, SOURCE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
StepMs = Callable[[str, bool, int, int], float]  # machine type, prompts?, tokens, layers
Weights = Mapping[tuple[str, str], float]  # of links, by their ends


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine with its layers [first, end) and limits of a step."""

    name: str
    kind: str
    first: int
    end: int
    kv_tokens: int  # of all its layers
    most_prompts: int
    most_prompt_tokens: int
    most_decodes: int

    @property
    def layers(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Admission:
    """When a request may start: by the number in flight, or by KV set aside for it."""

    most_in_flight: int | None = None
    reserve_tokens: float = 0.0  # for the output of each
    layer_share: float = 1.0  # of a layer's KV, all its machines together, at which none starts
    machine_share: float = 1.0  # of a machine's KV, above which paths avoid it
    waits: bool = True  # False: a request starts when it comes, over a full machine if need be


@dataclass(frozen=True)
class Served:
    """By request, in ms; -1: not yet at the end of the run."""

    launched_ms: Floats
    first_ms: Floats
    last_ms: Floats  # of its last token so far
    tokens: Ints

    def within(self, begin_ms: float, end_ms: float) -> tuple[float, float, float]:
        """Output tokens/s, mean prompt latency and mean ms per further token of an interval.

        Tokens are spread evenly between a request's first and last.
        """
        seen = self.first_ms >= 0.0
        first, last, tokens = self.first_ms[seen], self.last_ms[seen], self.tokens[seen]
        overlap = np.clip(np.minimum(last, end_ms) - np.maximum(first, begin_ms), 0.0, None)
        share = overlap / np.maximum(last - first, 1e-9)
        prompts = (first - self.launched_ms[seen])[(first >= begin_ms) & (first < end_ms)]
        return (
            float((tokens * share).sum()) / (end_ms - begin_ms) * 1e3,
            float(prompts.mean()) if prompts.size else math.nan,
            float(overlap.sum()) / max(float(((tokens - 1) * share).sum()), 1e-9),
        )


class Routes:
    """Paths by weights of links, interleaved: the one that is furthest behind its share is next."""

    def __init__(self, weights: Weights) -> None:
        used = sorted((start, end) for (start, end), weight in weights.items() if weight > 0.0)
        self._next = {
            start: {end: weights[start, end] for _, end in links}
            for start, links in groupby(used, key=lambda link: link[0])
        }
        self._credit = {start: dict.fromkeys(ends, 0.0) for start, ends in self._next.items()}

    def path(self, admits: Callable[[str], bool]) -> list[str] | None:
        """Names from source to sink over machines that admit; None: it came to where none does."""
        at, found = SOURCE, []
        while True:
            ends = {e: w for e, w in self._next[at].items() if e == SINK or admits(e)}
            if not ends:
                return None
            credit, total = self._credit[at], sum(ends.values())
            for end, weight in ends.items():
                credit[end] += weight / total
            at = max(ends, key=credit.__getitem__)
            credit[at] -= 1.0
            if at == SINK:
                return found
            found.append(at)


@dataclass(slots=True)
class _Node:
    machine: Machine
    prompts: deque[int] = field(default_factory=deque)
    decodes: deque[int] = field(default_factory=deque)
    busy: bool = False
    reserved: float = 0.0  # token-layers

    def admits(self, tokens: float, share: float) -> bool:
        room = share * self.machine.kv_tokens * self.machine.layers
        return self.reserved + tokens * self.machine.layers <= room


@dataclass(slots=True)
class _Request:
    path: list[tuple[_Node, int]]  # with the layers that it uses there
    reserved: float
    place: int = 0
    tokens: int = 0


class _Kind(IntEnum):
    CAME = 0
    ARRIVED = 1  # at a machine
    ENDED = 2  # a step


class Cluster:
    """Machines, links and requests of one run."""

    def __init__(
        self,
        machines: Sequence[Machine],
        weights: Weights,
        step_ms: StepMs,
        hop_ms: float,
        hop_ms_per_token: float,
        admission: Admission,
    ) -> None:
        self._nodes = {machine.name: _Node(machine) for machine in machines}
        self._routes = Routes(weights)
        self._step_ms = step_ms
        self._hop_ms, self._hop_ms_per_token = hop_ms, hop_ms_per_token
        self._admission = admission
        self._layers = max(machine.end for machine in machines)
        self._events: list[tuple[float, int, _Kind, str, list[int]]] = []
        self._waiting: deque[int] = deque()
        self._running: dict[int, _Request] = {}
        self._pushed = 0

    def run(self, arrival_ms: Floats, inputs: Ints, outputs: Ints, until_ms: float) -> Served:
        """Serve until a moment."""
        self._inputs, self._outputs = inputs.tolist(), outputs.tolist()
        count = arrival_ms.size
        self._served = Served(
            np.full(count, -1.0), np.full(count, -1.0), np.full(count, -1.0),
            np.zeros(count, dtype=np.int64),
        )  # fmt: skip
        for request, at in enumerate(arrival_ms):
            self._push(float(at), _Kind.CAME, "", [request])
        while self._events and self._events[0][0] <= until_ms:
            now, _, kind, name, requests = heapq.heappop(self._events)
            if kind is _Kind.CAME:
                self._waiting.extend(requests)
                self._admit(now)
            elif kind is _Kind.ARRIVED:
                self._arrived(self._nodes[name], requests, now)
            else:
                self._ended(self._nodes[name], requests, now)
        return self._served

    def _push(self, at_ms: float, kind: _Kind, name: str, requests: list[int]) -> None:
        heapq.heappush(self._events, (at_ms, self._pushed, kind, name, requests))
        self._pushed += 1

    def _admit(self, now: float) -> None:
        """Those that wait, first come first."""
        while self._waiting:
            tokens = self._inputs[self._waiting[0]] + self._admission.reserve_tokens
            names = self._path(tokens)
            if names is None:
                return
            request, at, path = self._waiting.popleft(), 0, []
            for name in names:
                node = self._nodes[name]
                layers, at = node.machine.end - at, node.machine.end
                node.reserved += tokens * layers
                path.append((node, layers))
            self._running[request] = _Request(path, tokens)
            self._served.launched_ms[request] = now
            self._push(now + self._hop_ms, _Kind.ARRIVED, names[0], [request])

    def _path(self, tokens: float) -> list[str] | None:
        rule = self._admission
        if rule.most_in_flight is not None:
            full = len(self._running) >= rule.most_in_flight
            return None if full else self._routes.path(lambda _: True)
        if rule.waits and self._fullest_layer() >= rule.layer_share:
            return None
        path = self._routes.path(lambda name: self._nodes[name].admits(tokens, rule.machine_share))
        return path if path is not None or rule.waits else self._routes.path(lambda _: True)

    def _fullest_layer(self) -> float:
        """Share of KV set aside, of the layer that has least left over all its machines."""
        used, room = np.zeros(self._layers), np.zeros(self._layers)
        for node in self._nodes.values():
            held = slice(node.machine.first, node.machine.end)
            used[held] += node.reserved / node.machine.layers
            room[held] += node.machine.kv_tokens
        return float((used / room).max())

    def _arrived(self, node: _Node, requests: list[int], now: float) -> None:
        for request in requests:
            queue = node.decodes if self._running[request].tokens else node.prompts
            queue.append(request)
        if not node.busy:
            self._start(node, now)

    def _start(self, node: _Node, now: float) -> None:
        """The next step of an idle machine, if anything waits."""
        machine, batch, tokens = node.machine, list[int](), 0
        prompts = bool(node.prompts)
        if prompts:
            while node.prompts and len(batch) < machine.most_prompts:
                more = tokens + self._inputs[node.prompts[0]]
                if batch and more > machine.most_prompt_tokens:
                    break
                tokens = more
                batch.append(node.prompts.popleft())
        else:
            while node.decodes and len(batch) < machine.most_decodes:
                batch.append(node.decodes.popleft())
            tokens = len(batch)
        if not batch:
            return
        running = [self._running[request] for request in batch]
        layers = max(one.path[one.place][1] for one in running)
        node.busy = True
        step_ms = self._step_ms(machine.kind, prompts, tokens, layers)
        self._push(now + step_ms, _Kind.ENDED, machine.name, batch)

    def _ended(self, node: _Node, batch: list[int], now: float) -> None:
        node.busy = False
        onward: dict[str, list[int]] = {}
        for request in batch:
            one = self._running[request]
            one.place += 1
            if one.place < len(one.path):
                onward.setdefault(one.path[one.place][0].machine.name, []).append(request)
            else:
                self._made(request, one, now + self._hop_ms)
        for name, requests in onward.items():
            tokens = sum(
                1 if self._running[request].tokens else self._inputs[request]
                for request in requests
            )
            at = now + self._hop_ms + tokens * self._hop_ms_per_token
            self._push(at, _Kind.ARRIVED, name, requests)
        self._admit(now)
        self._start(node, now)

    def _made(self, request: int, one: _Request, now: float) -> None:
        """A token is back at the coordinator."""
        one.place, one.tokens = 0, one.tokens + 1
        served = self._served
        if one.tokens == 1:
            served.first_ms[request] = now
        served.last_ms[request], served.tokens[request] = now, one.tokens
        if one.tokens < self._outputs[request]:
            first = one.path[0][0].machine.name
            self._push(now + self._hop_ms, _Kind.ARRIVED, first, [request])
            return
        for node, layers in one.path:
            node.reserved -= one.reserved * layers
        del self._running[request]

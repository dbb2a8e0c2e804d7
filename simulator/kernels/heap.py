"""A binary heap of events in arrays; equal times come out in the order in which they went in."""

from __future__ import annotations

from simulator.kernels.compiled import compiled
from simulator.kernels.types import HEAP_SIZE, SEQUENCE, State


@compiled
def push(state: State, at_ms: float, kind: int, a: int, b: int, c: int) -> None:
    """Add an event."""
    place = state.counters[HEAP_SIZE]
    state.counters[HEAP_SIZE] += 1
    order = state.counters[SEQUENCE]
    state.counters[SEQUENCE] += 1
    while place > 0:
        parent = (place - 1) // 2
        if state.heap_ms[parent] <= at_ms:  # the newest comes after its equals
            break
        _move(state, parent, place)
        place = parent
    _put(state, place, at_ms, order, kind, a, b, c)


@compiled
def drop_first(state: State) -> None:
    """Remove the event at place 0."""
    state.counters[HEAP_SIZE] -= 1
    size = state.counters[HEAP_SIZE]
    if size == 0:
        return
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and _before(state, child + 1, child):
            child += 1
        if not _before(state, child, size):
            break
        _move(state, child, place)
        place = child
    if place != size:
        _move(state, size, place)


@compiled
def _before(state: State, one: int, other: int) -> bool:
    if state.heap_ms[one] != state.heap_ms[other]:
        return state.heap_ms[one] < state.heap_ms[other]
    return state.heap_order[one] < state.heap_order[other]


@compiled
def _move(state: State, source: int, target: int) -> None:
    _put(
        state,
        target,
        state.heap_ms[source],
        state.heap_order[source],
        state.heap_kind[source],
        state.heap_a[source],
        state.heap_b[source],
        state.heap_c[source],
    )


@compiled
def _put(
    state: State, place: int, at_ms: float, order: int, kind: int, a: int, b: int, c: int
) -> None:
    state.heap_ms[place] = at_ms
    state.heap_order[place] = order
    state.heap_kind[place] = kind
    state.heap_a[place] = a
    state.heap_b[place] = b
    state.heap_c[place] = c

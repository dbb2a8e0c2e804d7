"""Relaxations: what no placement can beat, from quantised tables and at an exact cap."""

from __future__ import annotations

import numpy as np

from planner.perf.grids import Floats
from planner.placement.kernels.compiled import compiled
from planner.placement.kernels.stage import node_requests
from planner.placement.kernels.types import (
    FIRST,
    LAST,
    LATENCY,
    LAYERS,
    MIDDLE,
    MOST_NODES,
    PREFILL,
    SEARCHED,
    Bounds,
    Case,
    Ints,
    Load,
    Scratch,
    Shape,
    Terms,
)

PRICES = 16  # layer prices that the Lagrangian bounds try


@compiled
def enough_work(case: Case, classes: Ints, load: Load, k: int) -> bool:
    """Whether the nodes' most request-layers within grid[k] reach b x L."""
    total = 0.0
    for i in range(classes.shape[0]):
        total += case.shape.counts[i] * case.bounds.work[load.p, classes[i], k]
    return total >= load.batch * case.terms.layers


@compiled
def verdict(case: Case, classes: Ints, load: Load, k: int, stop_ms: float) -> int:
    """What refuses a pair under the cap grid[k] and a latency of stop_ms; SEARCHED if nothing.

    The work is checked apart, being the cheapest (`enough_work`).
    """
    work, shape = case.work, case.shape
    _relaxed_layers(case, classes, load, k)
    cover(shape, work.relaxed, work.middle)
    whole = shape.sizes.shape[0] - 1
    most = 0
    for t in range(1, whole + 1):
        layers = _last_layers(case, load, t, case.bounds.grid[k])
        if layers > 0:
            most = max(most, layers + work.middle[whole - t])
    if most < case.terms.layers:
        return LAYERS
    if _relaxed_latency_ms(case, load, k, stop_ms) > stop_ms:
        return LATENCY
    return SEARCHED


@compiled
def fill_slopes(bounds: Bounds, shape: Shape, classes: Ints, batch: int, out: Floats) -> None:
    """out[s]: no stage of s takes less per layer, whatever its layers."""
    for s in range(1, shape.sizes.shape[0]):
        low, high = 0, bounds.layer_grid.shape[0] - 1
        while low < high:
            k = (low + high) // 2
            total = 0
            for i in range(shape.counts.shape[0]):
                if shape.digits[s, i]:
                    total += shape.digits[s, i] * bounds.layer_requests[classes[i], k]
            if total >= batch:
                high = k
            else:
                low = k + 1
        out[s] = bounds.layer_grid[low - 1] if low > 0 else 0.0


@compiled
def fill_heads(case: Case, classes: Ints) -> None:
    """work.head[s]: the least that the head adds to a last stage of s."""
    for s in range(1, case.shape.sizes.shape[0]):
        least = np.inf
        for i in range(classes.shape[0]):
            if case.shape.digits[s, i]:
                for o in range(case.nodes.options[classes[i]]):
                    least = min(least, case.nodes.head_ms[classes[i], o, 1])
        case.work.head[s] = least


@compiled
def cover(shape: Shape, layers: Ints, out: Ints) -> None:
    """out[s]: most layers of a partition of s into stages of layers[t], any part idle."""
    out[0] = 0
    for s in range(1, shape.sizes.shape[0]):
        most = 0
        for k in range(shape.starts[s], shape.starts[s + 1]):
            t = shape.parts[k]
            most = max(most, out[s - t] + layers[t])
        out[s] = most


@compiled
def fill_most_layers(case: Case, classes: Ints, load: Load, cap_ms: float) -> None:
    """Most layers under the cap: of every subset in every role, of pipelines of subsets."""
    shape, work = case.shape, case.work
    total, whole = case.terms.layers, shape.sizes.shape[0] - 1
    count = shape.counts.shape[0]
    most_nodes = load.batch // load.share if load.share else MOST_NODES
    for i in range(count):
        for r in range(FIRST, LAST + 1):
            for n in range(total + 1):
                work.reach[i, r, n] = -1
    for r in range(FIRST, LAST + 1):
        for s in range(1, whole + 1):
            work.most_layers[r, s] = 0
            if shape.sizes[s] > most_nodes:
                continue
            low, high = 0, total - 1
            while low < high:
                n = (low + high + 1) // 2
                together = 0
                for i in range(count):
                    if shape.digits[s, i]:
                        x = work.reach[i, r, n]
                        if x < 0:
                            x = node_requests(case.nodes, classes[i], r, n, load, cap_ms)
                            work.reach[i, r, n] = x
                        together += shape.digits[s, i] * x
                if together >= load.batch:
                    low = n
                else:
                    high = n - 1
            work.most_layers[r, s] = low
    cover(shape, work.most_layers[MIDDLE], work.middle)
    work.first[0] = work.rest[0] = 0
    for s in range(1, whole + 1):
        first = rest = 0
        for k in range(shape.starts[s], shape.starts[s + 1]):
            t = shape.parts[k]
            if work.most_layers[FIRST, t] > 0:
                first = max(first, work.most_layers[FIRST, t] + work.middle[s - t])
            if work.most_layers[LAST, t] > 0:
                rest = max(rest, work.most_layers[LAST, t] + work.middle[s - t])
        work.first[s], work.rest[s] = min(first, total - 1), min(rest, total - 1)


@compiled
def layers_suffice(terms: Terms, shape: Shape, work: Scratch) -> bool:
    """Whether some pipeline of two or more stages reaches all layers."""
    whole = shape.sizes.shape[0] - 1
    for k in range(shape.starts[whole], shape.starts[whole + 1]):
        t = shape.parts[k]
        first, rest = work.most_layers[FIRST, t], work.rest[whole - t]
        if first > 0 and rest > 0 and first + rest >= terms.layers:
            return True
    return False


@compiled
def pipeline_bound_ms(case: Case, load: Load, stop_ms: float) -> float:
    """Lower bound of a pipeline's latency: Lagrangian of the number of layers.

    With the roles and the exact cap of `fill_most_layers`; stops above stop_ms.
    """
    work, shape = case.work, case.shape
    count = shape.sizes.shape[0]
    whole = count - 1
    low, high = np.inf, 0.0
    for s in range(1, count):
        low, high = min(low, work.slope[s]), max(high, work.slope[s])
    if low <= 0.0:
        return 0.0
    best = 0.0
    for step in range(PRICES + 1):
        price = low * (high / low) ** (step / PRICES) * (1.0 + 1e-9)
        work.value[0], work.with_first[0] = 0.0, np.inf
        for s in range(1, count):
            value, first = 0.0, np.inf
            for k in range(shape.starts[s], shape.starts[s + 1]):
                t = shape.parts[k]
                before = work.value[s - t]
                value = min(value, before)  # idle
                once = load.once_ms + load.hop_ms
                if work.most_layers[MIDDLE, t] > 0:
                    value = min(value, before + once + _reduced_ms(work, MIDDLE, t, price))
                if work.most_layers[FIRST, t] > 0:
                    first = min(first, before + once + _reduced_ms(work, FIRST, t, price))
            work.value[s], work.with_first[s] = value, first
        least = np.inf
        for t in range(1, whole):
            if work.most_layers[LAST, t] > 0:
                last = load.once_ms + work.head[t] + _reduced_ms(work, LAST, t, price)
                least = min(least, work.with_first[whole - t] + last)
        best = max(best, price * case.terms.layers + least)
        if best > stop_ms:
            break
    return best


@compiled
def _reduced_ms(work: Scratch, r: int, t: int, price: float) -> float:
    """Least latency of a stage less price x layers, apart from what it has once."""
    slope = work.slope[t] - price
    return slope * work.most_layers[r, t] if slope < 0.0 else slope


@compiled
def _relaxed_layers(case: Case, classes: Ints, load: Load, k: int) -> None:
    """work.relaxed[s]: most layers of s as one stage anywhere, under the cap grid[k]."""
    shape, out = case.shape, case.work.relaxed
    requests, table = case.bounds.requests, case.pairs.table[load.p]
    most_nodes = load.batch // load.share if load.share else MOST_NODES
    for s in range(1, shape.sizes.shape[0]):
        out[s] = 0
        if shape.sizes[s] > most_nodes:
            continue
        low, high = 0, case.terms.layers
        while low < high:
            n = (low + high + 1) // 2
            total = 0
            for i in range(shape.counts.shape[0]):
                if shape.digits[s, i]:
                    x = requests[table, classes[i], k, n]
                    if x >= load.share:
                        total += shape.digits[s, i] * min(x, load.batch)
            if total >= load.batch:
                low = n
            else:
                high = n - 1
        out[s] = low


@compiled
def _last_layers(case: Case, load: Load, s: int, cap_ms: float) -> int:
    """Most layers of subset s as the last stage, which has the head as well, under the cap."""
    work = case.work
    most = work.relaxed[s]
    if case.terms.kind != PREFILL and most and work.slope[s] > 0.0:  # there slopes are of latency
        left = (cap_ms - load.once_ms - work.head[s]) / work.slope[s]
        if left < most:
            most = int(max(left * (1.0 + 1e-9), 0.0))
    return most


@compiled
def _relaxed_latency_ms(case: Case, load: Load, k: int, stop_ms: float) -> float:
    """As `pipeline_bound_ms`, from `_relaxed_layers`: single stages included, memory coarser."""
    work, shape = case.work, case.shape
    count = shape.sizes.shape[0]
    whole = count - 1
    low, high = np.inf, 0.0
    for s in range(1, count):
        if work.relaxed[s] > 0:
            low, high = min(low, work.slope[s]), max(high, work.slope[s])
    best = 0.0
    for step in range(PRICES + 1):
        price = low * (high / low) ** (step / PRICES) if low > 0.0 else high
        price *= 1.0 + 1e-9
        work.value[0] = 0.0
        for s in range(1, count):
            value = 0.0
            for j in range(shape.starts[s], shape.starts[s + 1]):
                t = shape.parts[j]
                gain = 0.0  # idle
                if work.relaxed[t] > 0 and work.slope[t] < price:
                    gain = load.once_ms + load.hop_ms
                    gain += (work.slope[t] - price) * work.relaxed[t]
                value = min(value, work.value[s - t] + min(gain, 0.0))
            work.value[s] = value
        least = np.inf
        for t in range(1, count):
            layers = _last_layers(case, load, t, case.bounds.grid[k])
            if layers > 0:
                gain = load.once_ms + work.head[t] + min(work.slope[t] - price, 0.0) * layers
                least = min(least, work.value[whole - t] + gain)
        best = max(best, price * case.terms.layers + least)
        if best > stop_ms:
            break
    return best

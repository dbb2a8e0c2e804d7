"""Compiled inner loops of the exact placement solver; `exact.py` is the way in.

A combination of one *shape* (how often its distinct classes occur) has subsets numbered in mixed
radix: `digits[s, i]` nodes of its i-th class, so that `s - t` is the number of "s without t". All
functions take the numbers of `arrays.py`. Source: docs/formulation.md, section 3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from planner.perf.grids import Floats
from planner.placement.compiled import compiled

ONLY, FIRST, MIDDLE, LAST, NOWHERE = range(5)
DECODE, PREFILL, AGGREGATED = range(3)
MOST_NODES = 8  # of a combination
MOST_SUBSETS = 256  # of a combination of eight distinct nodes
WORK, COVER, LATENCY, SEARCHED, GAINED = range(5)  # how a combination ended, by rising effort
COST_PRECISION = 1e-5
PRICES = 16  # layer prices that the Lagrangian bounds try

Ints = Any


class Nodes(NamedTuple):
    """Node classes c, options o, roles r, layers l, requests per group g (see arrays.py)."""

    options: Ints  # [c]
    dp: Ints  # [c, o]
    layer_ms: Floats  # [c, o, g]
    head_ms: Floats  # [c, o, g]
    latency_ms: Floats  # [c, o, g] of one layer, with a p95 request
    overhead_ms: Floats  # [c, o]
    room: Ints  # [c, o, r, l] requests in flight of one group (P4)
    network_ms: Floats  # [c, r, l] per request
    most: Ints  # [c, l] requests that the KV hand-over allows


class Shape(NamedTuple):
    """Subsets of combinations with given multiplicities."""

    counts: Ints  # [i]
    digits: Ints  # [s, i]
    sizes: Ints  # [s]
    starts: Ints  # [s + 1] into parts
    parts: Ints  # subsets t of s, t != 0, by s


class Pairs(NamedTuple):
    """Arrays over the pairs (M, b) and, for aggregated serving, least shares."""

    micro_batches: Ints
    batch: Ints
    least_share: Ints
    limit_ms: Floats  # longest cycle (P5); prefill: longest step
    rps_ms: Floats  # throughput x cycle
    table: Ints  # which table of `Bounds.requests` holds for the pair


class Bounds(NamedTuple):
    """Quantised relaxations: index k stands for every time up to grid[k]."""

    grid: Floats  # [k] ms, geometric
    requests: Ints  # [table, c, k, l] most requests of a node without embedding, head, hops
    layer_grid: Floats  # [k] ms, finer
    layer_requests: Ints  # [c, k] most requests with a layer below layer_grid[k], memory apart
    work: Floats  # [p, c, k] most request-layers of a node


class Terms(NamedTuple):
    """Scalars of the phase."""

    kind: int
    layers: int
    budget_ms: float  # prefill: of the summed latency
    hop_latency_ms: float
    hop_bits: float  # of one request
    hop_bits_extra: float
    tolerance: float  # relative, of the search


class Split(NamedTuple):
    """Work space of one stage's split: requests per group by [i, o]."""

    low: Ints
    middle: Ints
    high: Ints
    room: Ints
    space: Ints


class Scratch(NamedTuple):
    """Work space of one combination, reused."""

    reach: Ints  # [i, r, l] requests of a node under the cap, -1 unknown
    slots: Floats  # [i, r, l, x] prefill: latency of the x-th prompt
    most_layers: Ints  # [r, s]
    cost: Floats  # [r, s, l] ms, -1 unknown
    middle: Ints  # [s] most layers of middle stages
    first: Ints  # [s] most layers of a first and middle stages
    rest: Ints  # [s] most layers of middle stages and a last one
    best: Floats  # [s, l] least latency of a first and middle stages
    from_subset: Ints  # [s, l]
    from_layers: Ints  # [s, l]
    relaxed: Ints  # [s]
    slope: Floats  # [s]
    head: Floats  # [s]
    value: Floats  # [s]
    with_first: Floats  # [s]
    split: Split
    alive: Ints  # [p]
    shortest: Floats  # [p]
    stages: Ints
    layers: Ints
    shared: Floats  # [p, g, r, l] cost of groups of one and two nodes, 0 unknown


class Results(NamedTuple):
    """One row per combination."""

    code: Ints
    rps: Floats
    pair: Ints
    cycle_ms: Floats
    stages: Ints  # how many
    subsets: Ints  # [stage]
    stage_layers: Ints  # [stage]
    searches: Ints


@compiled
def _within(
    nodes: Nodes, c: int, o: int, r: int, n: int, low: int, high: int, cap_ms: float
) -> int:
    """Most requests of one group, from `low` to `high`, whose step stays within the cap."""
    once = nodes.overhead_ms[c, o]
    with_head = r == ONLY or r == LAST
    while low < high:
        g = (low + high + 1) // 2
        step = n * nodes.layer_ms[c, o, g] + once
        if with_head:
            step += nodes.head_ms[c, o, g]
        if step <= cap_ms:
            low = g
        else:
            high = g - 1
    return low


@compiled
def _requests(nodes: Nodes, c: int, o: int, r: int, n: int, g: int, cap_ms: float) -> int:
    """Requests of a node whose groups take g each, as far as its network moves them in time."""
    x = min(g * nodes.dp[c, o], nodes.most[c, n])
    moved = nodes.network_ms[c, r, n]
    return int(cap_ms / moved) if moved * x > cap_ms else x


@compiled
def node_requests(
    nodes: Nodes, c: int, r: int, n: int, m: int, cap_ms: float, share: int, batch: int
) -> int:
    """Most requests that a node takes within the cap, in its best option."""
    most = 0
    for o in range(nodes.options[c]):
        dp = nodes.dp[c, o]
        if share * dp > batch:
            continue
        high = min((batch + dp - 1) // dp, nodes.room[c, o, r, n] // m)
        g = _within(nodes, c, o, r, n, 0, high, cap_ms)
        x = min(_requests(nodes, c, o, r, n, g, cap_ms), batch)
        if x >= share * dp:
            most = max(most, x)
    return most


@compiled
def _shares_fit(
    options: Ints, dp: Ints, classes: Ints, digits: Ints, share: int, batch: int, room: Ints,
    space: Ints,
) -> bool:  # fmt: skip
    """Whether nodes can split a batch with `share` requests for every group at work.

    `room[i, o]`: most requests of a node of the i-th class in option o. Depth first over the
    nodes, each in one option or idle; [low, high] is what those so far can take.
    """
    low, high, rest, chosen, which = space[0], space[1], space[2], space[3], space[4]
    depth = 0
    for i in range(digits.shape[0]):
        for _ in range(digits[i]):
            which[depth] = i
            depth += 1
    rest[depth] = 0
    for j in range(depth - 1, -1, -1):
        most = 0
        for o in range(options[classes[which[j]]]):
            if room[which[j], o] >= share * dp[classes[which[j]], o]:
                most = max(most, room[which[j], o])
        rest[j] = rest[j + 1] + most
    j = 0
    low[0] = high[0] = 0
    chosen[0] = -2
    while j >= 0:
        chosen[j] += 1
        i = which[j]
        c = classes[i]
        if chosen[j] >= options[c]:
            j -= 1
            continue
        low[j + 1], high[j + 1] = low[j], high[j]
        if chosen[j] >= 0:
            least = share * dp[c, chosen[j]]
            if room[i, chosen[j]] < least:
                continue
            low[j + 1] += least
            high[j + 1] += room[i, chosen[j]]
        if low[j + 1] > batch or high[j + 1] + rest[j + 1] < batch:
            continue
        if high[j + 1] >= batch:
            return True
        if j + 1 < depth:
            j += 1
            chosen[j] = -2
    return False


@compiled
def stage_ms(
    nodes: Nodes, classes: Ints, digits: Ints, r: int, n: int, m: int, low_ms: float,
    cap_ms: float, share: int, batch: int, work: Split,
) -> float:  # fmt: skip
    """Least step of a stage in cycles, if it is within the cap; infinite otherwise (P3).

    `low_ms` is a lower bound. Bisects on time; the groups of every option stay between what they
    take within the lower and the upper end.
    """
    layer_ms, head_ms, all_dp, most = nodes.layer_ms, nodes.head_ms, nodes.dp, nodes.most
    count = digits.shape[0]
    head = 1.0 if r == ONLY or r == LAST else 0.0
    low, high, trial = low_ms, cap_ms, cap_ms
    first = True
    while True:
        total = 0
        for i in range(count):
            if digits[i] == 0:
                continue
            c = classes[i]
            moved = nodes.network_ms[c, r, n]
            best = 0
            for o in range(nodes.options[c]):
                dp = all_dp[c, o]
                if first:
                    g = 0
                    h = min((batch + dp - 1) // dp, nodes.room[c, o, r, n] // m)
                    if share * dp > batch:
                        h = 0
                    work.low[i, o] = 0
                else:
                    g, h = work.low[i, o], work.high[i, o]
                once = nodes.overhead_ms[c, o]
                while g < h:
                    half = (g + h + 1) >> 1
                    if n * layer_ms[c, o, half] + head * head_ms[c, o, half] + once <= trial:
                        g = half
                    else:
                        h = half - 1
                work.middle[i, o] = g
                x = min(g * dp, most[c, n], batch)
                if moved * x > trial:
                    x = int(trial / moved)
                work.room[i, o] = x
                if x > best and x >= share * dp:
                    best = x
            total += digits[i] * best
        fits = total >= batch
        if fits and share > 0:
            fits = _shares_fit(
                nodes.options, all_dp, classes, digits, share, batch, work.room, work.space
            )
        if fits:
            high = trial
            for i in range(count):
                if digits[i]:
                    for o in range(nodes.options[classes[i]]):
                        work.high[i, o] = work.middle[i, o]
        elif first:
            return np.inf
        else:
            low = trial
            for i in range(count):
                if digits[i]:
                    for o in range(nodes.options[classes[i]]):
                        work.low[i, o] = work.middle[i, o]
        first = False
        if high - low <= COST_PRECISION * high:
            return high
        trial = 0.5 * (low + high)


@compiled
def _prompt_latency(
    nodes: Nodes, c: int, r: int, n: int, m: int, cap_ms: float, batch: int, out: Floats
) -> None:
    """out[x]: least latency of a node with x prompts whose step stays within the cap."""
    for x in range(1, batch + 1):
        out[x] = np.inf
    for o in range(nodes.options[c]):
        dp = nodes.dp[c, o]
        once = nodes.overhead_ms[c, o]
        most = min((batch + dp - 1) // dp, nodes.room[c, o, r, n] // m)
        g = _within(nodes, c, o, r, n, 0, most, cap_ms)
        for x in range(1, min(batch, _requests(nodes, c, o, r, n, g, cap_ms)) + 1):
            g = (x + dp - 1) // dp
            latency = n * nodes.latency_ms[c, o, g] + once
            if r == ONLY or r == LAST:
                latency += nodes.head_ms[c, o, g]
            out[x] = min(out[x], latency)


@compiled
def _split_latency(
    shape: Shape, slots: Floats, s: int, r: int, n: int, batch: int, taken: Ints
) -> float:
    """Least latency of a stage that splits `batch` prompts: always the cheapest slot next."""
    taken[:] = 0
    count = shape.counts.shape[0]
    worst = 0.0
    left = batch
    # Equal nodes take turns: with q of a class each node has taken t // q or one more.
    while left > 0:
        best, which = np.inf, -1
        for i in range(count):
            q = shape.digits[s, i]
            if q and taken[i] < q * batch:
                slot = slots[i, r, n, taken[i] // q + 1]
                if slot < best:
                    best, which = slot, i
        if which < 0:
            return np.inf
        worst = max(worst, best)
        taken[which] += 1
        left -= 1
    return worst


@compiled
def _small_group(shape: Shape, classes: Ints, s: int) -> int:
    """Number of a group of one or two nodes among all such groups."""
    a = b = -1
    for i in range(shape.counts.shape[0]):
        for _ in range(shape.digits[s, i]):
            a, b = b, classes[i]
    return b * (b + 3) // 2 + a + 1


@compiled
def _cost(
    nodes: Nodes, terms: Terms, shape: Shape, classes: Ints, work: Scratch, p: int, s: int,
    r: int, n: int, m: int, cap_ms: float, share: int, batch: int,
) -> float:  # fmt: skip
    """What a stage adds to the latency, remembered; under the cap."""
    known = work.cost[r, s, n]
    if known >= 0.0:
        return known if known <= cap_ms or terms.kind == PREFILL else np.inf
    if terms.kind == PREFILL:
        for i in range(shape.counts.shape[0]):
            if shape.digits[s, i] and work.slots[i, r, n, 0] < 0.0:
                _prompt_latency(
                    nodes, classes[i], r, n, m, cap_ms, batch, work.slots[i, r, n]
                )
                work.slots[i, r, n, 0] = 0.0
        found = _split_latency(shape, work.slots, s, r, n, batch, work.split.space[0])
    else:
        group = -1
        if shape.sizes[s] <= 2 and r != ONLY:
            group = _small_group(shape, classes, s)
            found = work.shared[p, group, r - 1, n]
            if found > 0.0:
                work.cost[r, s, n] = found
                return found if found <= cap_ms else np.inf
        found = stage_ms(
            nodes, classes, shape.digits[s], r, n, m, work.slope[s] * n, cap_ms, share, batch,
            work.split,
        )  # fmt: skip
        if found == np.inf:
            return found  # under this cap; a looser one may ask again
        if group >= 0:
            work.shared[p, group, r - 1, n] = found
    work.cost[r, s, n] = found
    return found


@compiled
def _relaxed_layers(
    bounds: Bounds, table: int, shape: Shape, classes: Ints, k: int, share: int, batch: int,
    layers: int, out: Ints,
) -> None:  # fmt: skip
    """out[s]: most layers of subset s as one stage anywhere, under the cap grid[k]."""
    most_nodes = batch // share if share else MOST_NODES
    for s in range(1, shape.sizes.shape[0]):
        out[s] = 0
        if shape.sizes[s] > most_nodes:
            continue
        low, high = 0, layers
        while low < high:
            n = (low + high + 1) // 2
            total = 0
            for i in range(shape.counts.shape[0]):
                if shape.digits[s, i]:
                    x = bounds.requests[table, classes[i], k, n]
                    if x >= share:
                        total += shape.digits[s, i] * min(x, batch)
            if total >= batch:
                low = n
            else:
                high = n - 1
        out[s] = low


@compiled
def _cover(shape: Shape, layers: Ints, out: Ints) -> None:
    """out[s]: most layers of a partition of s, any part idle where that is as good."""
    out[0] = 0
    for s in range(1, shape.sizes.shape[0]):
        most = 0
        for k in range(shape.starts[s], shape.starts[s + 1]):
            t = shape.parts[k]
            most = max(most, out[s - t] + layers[t])
        out[s] = most


@compiled
def _last_layers(terms: Terms, work: Scratch, s: int, cap_ms: float, once_ms: float) -> int:
    """Most layers of subset s as the last stage, which has the head as well, under the cap."""
    most = work.relaxed[s]
    if terms.kind != PREFILL and most and work.slope[s] > 0.0:  # there slopes are of latency
        left = (cap_ms - once_ms - work.head[s]) / work.slope[s]
        if left < most:
            most = int(max(left * (1.0 + 1e-9), 0.0))
    return most


@compiled
def _latency_bound(
    terms: Terms, shape: Shape, work: Scratch, hop_ms: float, once_ms: float, cap_ms: float,
    stop_ms: float,
) -> float:  # fmt: skip
    """Lower bound of the summed latency: Lagrangian of the number of layers (formulation, 3).

    Uses relaxed (most layers of a subset), slope (least ms per layer) and head. Stops above
    stop_ms.
    """
    count = shape.sizes.shape[0]
    whole = count - 1
    low, high = np.inf, 0.0
    for s in range(1, count):
        if work.relaxed[s] > 0:
            low = min(low, work.slope[s])
            high = max(high, work.slope[s])
    best = 0.0
    for step in range(PRICES + 1):
        price = low * (high / low) ** (step / PRICES) if low > 0.0 else high
        price *= 1.0 + 1e-9
        work.value[0] = 0.0
        for s in range(1, count):
            value = 0.0
            for k in range(shape.starts[s], shape.starts[s + 1]):
                t = shape.parts[k]
                gain = 0.0  # idle
                if work.relaxed[t] > 0 and work.slope[t] < price:
                    gain = once_ms + hop_ms + (work.slope[t] - price) * work.relaxed[t]
                value = min(value, work.value[s - t] + min(gain, 0.0))
            work.value[s] = value
        least = np.inf
        for t in range(1, count):
            layers = _last_layers(terms, work, t, cap_ms, once_ms)
            if layers > 0:
                gain = once_ms + work.head[t] + min(work.slope[t] - price, 0.0) * layers
                least = min(least, work.value[whole - t] + gain)
        best = max(best, price * terms.layers + least)
        if best > stop_ms:
            break
    return best


@compiled
def _grid_index(grid: Floats, value: float) -> int:
    """Smallest k with grid[k] >= value (the last one if there is none)."""
    low, high = 0, grid.shape[0] - 1
    while low < high:
        k = (low + high) // 2
        if grid[k] >= value:
            high = k
        else:
            low = k + 1
    return low


@compiled
def _slopes(
    bounds: Bounds, shape: Shape, classes: Ints, batch: int, out: Floats
) -> None:
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
def _passes(
    nodes: Nodes, terms: Terms, bounds: Bounds, pairs: Pairs, p: int, shape: Shape, classes: Ints,
    work: Scratch, k: int, hop_ms: float, once_ms: float, stop_ms: float,
) -> int:  # fmt: skip
    """Whether relaxations leave pair p a placement under the cap grid[k]: what refuses it."""
    batch, share = pairs.batch[p], pairs.least_share[p]
    total = 0.0
    for i in range(shape.counts.shape[0]):
        total += shape.counts[i] * bounds.work[p, classes[i], k]
    if total < batch * terms.layers:
        return WORK
    _relaxed_layers(
        bounds, pairs.table[p], shape, classes, k, share, batch, terms.layers, work.relaxed
    )
    _cover(shape, work.relaxed, work.middle)
    whole = shape.sizes.shape[0] - 1
    cap_ms = bounds.grid[k]
    most = 0
    for t in range(1, whole + 1):
        layers = _last_layers(terms, work, t, cap_ms, once_ms)
        if layers > 0:
            most = max(most, layers + work.middle[whole - t])
    if most < terms.layers:
        return COVER
    if _latency_bound(terms, shape, work, hop_ms, once_ms, cap_ms, stop_ms) > stop_ms:
        return LATENCY
    return SEARCHED


@compiled
def _most_layers(
    nodes: Nodes, terms: Terms, shape: Shape, classes: Ints, work: Scratch, m: int, batch: int,
    share: int, cap_ms: float,
) -> None:  # fmt: skip
    """Most layers of every subset in every role under the cap, and of pipelines of subsets."""
    total, whole = terms.layers, shape.sizes.shape[0] - 1
    count = shape.counts.shape[0]
    most_nodes = batch // share if share else MOST_NODES
    work.reach[:count] = -1
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
                            x = node_requests(nodes, classes[i], r, n, m, cap_ms, share, batch)
                            work.reach[i, r, n] = x
                        together += shape.digits[s, i] * x
                if together >= batch:
                    low = n
                else:
                    high = n - 1
            work.most_layers[r, s] = low
    _cover(shape, work.most_layers[MIDDLE], work.middle)
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
def _layers_suffice(terms: Terms, shape: Shape, work: Scratch) -> bool:
    """Whether some pipeline of two or more stages reaches all layers."""
    whole = shape.sizes.shape[0] - 1
    for k in range(shape.starts[whole], shape.starts[whole + 1]):
        t = shape.parts[k]
        if (
            work.most_layers[FIRST, t] > 0
            and work.rest[whole - t] > 0
            and work.most_layers[FIRST, t] + work.rest[whole - t] >= terms.layers
        ):
            return True
    return False


@compiled
def _reduced_ms(work: Scratch, r: int, t: int, price: float) -> float:
    """Least latency of a stage less price x layers, apart from what it has once."""
    slope = work.slope[t] - price
    return slope * work.most_layers[r, t] if slope < 0.0 else slope


@compiled
def _pipeline_bound(
    terms: Terms, shape: Shape, work: Scratch, hop_ms: float, once_ms: float, stop_ms: float
) -> float:
    """As `_latency_bound`, with the roles and the exact cap of `_most_layers`."""
    count = shape.sizes.shape[0]
    whole = count - 1
    low, high = np.inf, 0.0
    for s in range(1, count):
        low = min(low, work.slope[s])
        high = max(high, work.slope[s])
    if low <= 0.0:
        return 0.0
    best = 0.0
    for step in range(PRICES + 1):
        price = low * (high / low) ** (step / PRICES) * (1.0 + 1e-9)
        work.value[0] = 0.0
        work.with_first[0] = np.inf
        for s in range(1, count):
            value, first = 0.0, np.inf
            for k in range(shape.starts[s], shape.starts[s + 1]):
                t = shape.parts[k]
                if work.most_layers[MIDDLE, t] > 0:
                    gain = once_ms + hop_ms + _reduced_ms(work, MIDDLE, t, price)
                    value = min(value, work.value[s - t] + gain)
                value = min(value, work.value[s - t])  # idle
                if work.most_layers[FIRST, t] > 0:
                    gain = once_ms + hop_ms + _reduced_ms(work, FIRST, t, price)
                    first = min(first, work.value[s - t] + gain)
            work.value[s], work.with_first[s] = value, first
        least = np.inf
        for t in range(1, whole):
            if work.most_layers[LAST, t] > 0:
                gain = once_ms + work.head[t] + _reduced_ms(work, LAST, t, price)
                least = min(least, work.with_first[whole - t] + gain)
        best = max(best, price * terms.layers + least)
        if best > stop_ms:
            break
    return best


@compiled
def _pipeline(
    nodes: Nodes, terms: Terms, shape: Shape, classes: Ints, work: Scratch, p: int, m: int,
    batch: int, share: int, hop_ms: float, once_ms: float, cap_ms: float, budget_ms: float,
    stages: Ints, layers: Ints,
) -> int:  # fmt: skip
    """Pipeline of least latency under the cap and within the budget; number of its stages.

    0 if there is none, -COVER or -LATENCY if a bound says so.

    Fills stages and layers, in pipeline order.
    """
    total, whole = terms.layers, shape.sizes.shape[0] - 1
    count = shape.counts.shape[0]
    only_role, first_role = np.int64(ONLY), np.int64(FIRST)
    middle_role, last_role = np.int64(MIDDLE), np.int64(LAST)
    if terms.kind == PREFILL:
        work.cost[:, : whole + 1] = -1.0
        work.slots[:count, :, :, 0] = -1.0
    least, kept = budget_ms, 0
    only = _cost(
        nodes, terms, shape, classes, work, p, whole, only_role, total, m, cap_ms, share, batch
    )
    if only <= least:
        least, kept = only, 1
        stages[0], layers[0] = whole, total
    _most_layers(nodes, terms, shape, classes, work, m, batch, share, cap_ms)
    if not _layers_suffice(terms, shape, work):
        return kept if kept else -COVER
    if _pipeline_bound(terms, shape, work, hop_ms, once_ms, least) > least:
        return kept if kept else -LATENCY
    last_subset = last_layers = last_group = -1
    for s in range(1, whole):
        left = whole - s
        low, high = max(1, total - work.rest[left]), work.first[s]
        if low > high or work.rest[left] == 0:
            continue
        for n in range(low, high + 1):
            work.best[s, n] = np.inf
        for n in range(low, min(high, work.most_layers[FIRST, s]) + 1):
            cost = _cost(nodes, terms, shape, classes, work, p, s, first_role, n, m, cap_ms, share, batch)
            if cost + hop_ms <= least:
                work.best[s, n] = cost + hop_ms
                work.from_subset[s, n] = 0
        for k in range(shape.starts[s], shape.starts[s + 1]):
            t = shape.parts[k]
            before = s - t
            if before == 0 or work.most_layers[MIDDLE, t] == 0:
                continue
            low_before = max(1, total - work.rest[whole - before])
            high_before = work.first[before]
            if low_before > high_before or work.rest[whole - before] == 0:
                continue
            # fewest layers of t first: its latency only grows with them
            for n2 in range(max(1, low - high_before), work.most_layers[MIDDLE, t] + 1):
                start = max(low, low_before + n2)
                end = min(high, high_before + n2)
                if start > end:
                    continue
                cost = -1.0
                for n in range(start, end + 1):
                    sofar = work.best[before, n - n2]
                    if sofar == np.inf or sofar >= work.best[s, n]:
                        continue
                    if cost < 0.0:
                        cost = work.cost[MIDDLE, t, n2]
                        if cost < 0.0 or cost > cap_ms:
                            cost = _cost(
                                nodes, terms, shape, classes, work, p, t, middle_role, n2, m, cap_ms,
                                share, batch,
                            )  # fmt: skip
                        cost += hop_ms
                        if cost > least:
                            break
                    if sofar + cost < work.best[s, n] and sofar + cost <= least:
                        work.best[s, n] = sofar + cost
                        work.from_subset[s, n] = t
                        work.from_layers[s, n] = n2
        for k in range(shape.starts[left], shape.starts[left + 1]):
            t = shape.parts[k]
            if t != left and terms.kind != AGGREGATED:
                continue  # an idle node never helps
            for n in range(max(low, total - work.most_layers[LAST, t]), high + 1):
                if work.best[s, n] >= least:
                    continue
                cost = work.best[s, n] + _cost(
                    nodes, terms, shape, classes, work, p, t, last_role, total - n, m, cap_ms, share,
                    batch,
                )  # fmt: skip
                if cost <= least:
                    least = cost
                    last_subset, last_layers, last_group = s, n, t
    if last_subset < 0:
        return kept
    return _trace(work, last_subset, last_layers, last_group, total, stages, layers)


@compiled
def _trace(
    work: Scratch, s: int, n: int, group: int, total: int, stages: Ints, layers: Ints
) -> int:
    """Follow the choices back from the last stage; in pipeline order."""
    stages[0] = group
    layers[0] = total - n
    count = 1
    t = work.from_subset[s, n]
    while t != 0:
        taken = work.from_layers[s, n]
        stages[count] = t
        layers[count] = taken
        count += 1
        s -= t
        n -= taken
        t = work.from_subset[s, n]
    stages[count] = s
    layers[count] = n
    count += 1
    for i in range(count // 2):
        j = count - 1 - i
        stages[i], stages[j] = stages[j], stages[i]
        layers[i], layers[j] = layers[j], layers[i]
    return count


@compiled
def _measure(
    nodes: Nodes, terms: Terms, shape: Shape, classes: Ints, work: Scratch, p: int, m: int,
    batch: int, share: int, hop_ms: float, cap_ms: float, count: int, stages: Ints, layers: Ints,
) -> tuple[float, float]:  # fmt: skip
    """Summed latency and slowest step of a pipeline; prefill: the cap it was found under."""
    if terms.kind == PREFILL:
        return 0.0, cap_ms
    slowest, latency = 0.0, hop_ms * (count - 1)
    for i in range(count):
        if count == 1:
            r = ONLY
        elif i == 0:
            r = FIRST
        else:
            r = LAST if i == count - 1 else MIDDLE
        cost = _cost(
            nodes, terms, shape, classes, work, p, stages[i], r, layers[i], m, cap_ms, share, batch
        )
        slowest = max(slowest, cost)
        latency += cost
    return latency, slowest


@compiled
def solve(
    nodes: Nodes, terms: Terms, bounds: Bounds, pairs: Pairs, shape: Shape, members: Ints,
    peak_gbit: Floats, floors: Floats, gain: float, work: Scratch, out: Results,
) -> None:  # fmt: skip
    """Best placement of every combination (a row of distinct classes) that beats its floor.

    `gain`: relative, what a placement must be above the floor to count.
    """
    number_of_pairs = pairs.batch.shape[0]
    alive, shortest, stages, layers = work.alive, work.shortest, work.stages, work.layers
    whole = shape.sizes.shape[0] - 1
    for row in range(members.shape[0]):
        classes = members[row]
        slowest_network = np.inf
        once_ms = np.inf
        for i in range(classes.shape[0]):
            slowest_network = min(slowest_network, peak_gbit[classes[i]])
            for o in range(nodes.options[classes[i]]):
                once_ms = min(once_ms, nodes.overhead_ms[classes[i], o])
        for s in range(1, whole + 1):
            work.head[s] = np.inf
            for i in range(classes.shape[0]):
                if shape.digits[s, i]:
                    for o in range(nodes.options[classes[i]]):
                        work.head[s] = min(work.head[s], nodes.head_ms[classes[i], o, 1])
        target = floors[row] * (1.0 + gain)
        code, count = WORK, 0
        sloped = 0
        for p in range(number_of_pairs):
            m = pairs.micro_batches[p] if terms.kind != PREFILL else 1
            limit = pairs.limit_ms[p]
            if target > 0.0:
                limit = min(limit, pairs.rps_ms[p] / target)
            k = _grid_index(bounds.grid, limit / m)
            if bounds.grid[k] < limit / m:
                k = bounds.grid.shape[0] - 1
            batch = pairs.batch[p]
            hop_ms = terms.hop_latency_ms + (batch * terms.hop_bits + terms.hop_bits_extra) / (
                slowest_network * 1e6
            )
            stop_ms = terms.budget_ms if terms.kind == PREFILL else limit
            total = 0.0
            for i in range(classes.shape[0]):
                total += shape.counts[i] * bounds.work[p, classes[i], k]
            if total < batch * terms.layers:
                continue
            if sloped != batch:
                _slopes(bounds, shape, classes, batch, work.slope)
                sloped = batch
            verdict = _passes(
                nodes, terms, bounds, pairs, p, shape, classes, work, k, hop_ms, once_ms, stop_ms
            )
            if verdict != SEARCHED:
                code = max(code, verdict)
            else:
                alive[count] = p
                count += 1
        searches = 0
        if count:  # the shortest cycle that relaxations leave, best pair first
            for j in range(count):
                p = alive[j]
                m = pairs.micro_batches[p] if terms.kind != PREFILL else 1
                batch = pairs.batch[p]
                hop_ms = terms.hop_latency_ms + (
                    batch * terms.hop_bits + terms.hop_bits_extra
                ) / (slowest_network * 1e6)
                limit = pairs.limit_ms[p]
                if target > 0.0:
                    limit = min(limit, pairs.rps_ms[p] / target)
                if sloped != batch:
                    _slopes(bounds, shape, classes, batch, work.slope)
                    sloped = batch
                low, high = 0, _grid_index(bounds.grid, limit / m)
                while low < high:
                    k = (low + high) // 2
                    stop_ms = terms.budget_ms if terms.kind == PREFILL else m * bounds.grid[k]
                    verdict = _passes(
                        nodes, terms, bounds, pairs, p, shape, classes, work, k, hop_ms, once_ms,
                        stop_ms,
                    )  # fmt: skip
                    if verdict == SEARCHED:
                        high = k
                    else:
                        low = k + 1
                shortest[j] = m * (bounds.grid[low - 1] if low > 0 else 0.0)
            # insertion sort by the bound of throughput, highest first
            for j in range(1, count):
                p, short = alive[j], shortest[j]
                bound = pairs.rps_ms[p] / max(short, 1e-12)
                i = j - 1
                while i >= 0 and pairs.rps_ms[alive[i]] / max(shortest[i], 1e-12) < bound:
                    alive[i + 1], shortest[i + 1] = alive[i], shortest[i]
                    i -= 1
                alive[i + 1], shortest[i + 1] = p, short
        for j in range(count):
            p = alive[j]
            m = pairs.micro_batches[p]
            stretch = m if terms.kind != PREFILL else 1
            batch, share = pairs.batch[p], pairs.least_share[p]
            if pairs.rps_ms[p] / max(shortest[j], 1e-12) <= target:
                break
            hop_ms = terms.hop_latency_ms + (batch * terms.hop_bits + terms.hop_bits_extra) / (
                slowest_network * 1e6
            )
            high = pairs.limit_ms[p]
            if target > 0.0:
                high = min(high, pairs.rps_ms[p] / target)
            low = shortest[j]
            if sloped != batch:
                _slopes(bounds, shape, classes, batch, work.slope)
                sloped = batch
            work.cost[:, : whole + 1] = -1.0
            step = terms.tolerance if terms.kind != PREFILL else 1.0
            found, width, trial = False, step, high
            while True:
                cap_ms = trial / stretch
                budget = terms.budget_ms if terms.kind == PREFILL else trial
                number = _pipeline(
                    nodes, terms, shape, classes, work, p, m, batch, share, hop_ms, once_ms, cap_ms,
                    budget, stages, layers,
                )  # fmt: skip
                searches += number >= 0
                code = max(code, SEARCHED if number == 0 else -number)
                if number <= 0:
                    if not found:
                        break  # nothing beats the target with this pair
                    low, width = trial, step
                else:
                    found = True
                    latency, slowest = _measure(
                        nodes, terms, shape, classes, work, p, m, batch, share, hop_ms, cap_ms,
                        number, stages, layers,
                    )  # fmt: skip
                    high = max(latency, stretch * slowest) if terms.kind != PREFILL else slowest
                    out.rps[row] = pairs.rps_ms[p] / high
                    out.pair[row] = p
                    out.cycle_ms[row] = high
                    out.stages[row] = number
                    for i in range(number):
                        out.subsets[row, i] = stages[i]
                        out.stage_layers[row, i] = layers[i]
                    code = GAINED
                    if terms.kind != PREFILL and latency >= stretch * slowest:
                        break  # a lower cap only lengthens the sum
                if high * (1.0 - terms.tolerance) <= low:
                    break
                # just below what was found: most often nothing is there, and that ends it
                trial = max(high * (1.0 - width), 0.5 * (low + high))
                width *= 8.0
            if found:
                target = out.rps[row] * (1.0 + terms.tolerance)
        out.code[row] = code
        out.searches[row] = searches


@compiled
def fill_requests(
    nodes: Nodes, grid: Floats, m: int, width: int, most: int, out: Ints
) -> None:
    """out[c, k, l]: most requests of a node within grid[k], in options of at most `width` groups."""
    for c in range(out.shape[0]):
        for n in range(1, out.shape[2]):
            moved = nodes.network_ms[c, NOWHERE, n]
            for o in range(nodes.options[c]):
                dp = nodes.dp[c, o]
                if dp > width:
                    continue
                limit = min(nodes.room[c, o, NOWHERE, n] // m, most)
                g = 0
                for k in range(grid.shape[0]):
                    while g < limit:
                        step = n * nodes.layer_ms[c, o, g + 1] + nodes.overhead_ms[c, o]
                        if step > grid[k]:
                            break
                        g += 1
                    x = min(g * dp, nodes.most[c, n], most)
                    if moved * x > grid[k]:
                        x = int(grid[k] / moved)
                    out[c, k, n] = max(out[c, k, n], x)


@compiled
def fill_layer_requests(nodes: Nodes, grid: Floats, most: int, out: Ints) -> None:
    """out[c, k]: most requests of a node for which one layer takes at most grid[k]."""
    for c in range(out.shape[0]):
        for o in range(nodes.options[c]):
            g = 0
            for k in range(grid.shape[0]):
                while g < most and nodes.latency_ms[c, o, g + 1] <= grid[k]:
                    g += 1
                out[c, k] = max(out[c, k], min(g * nodes.dp[c, o], most))


@compiled
def fill_work(requests: Ints, batch: int, share: int, out: Floats) -> None:
    """out[c, k]: most layers x requests of a micro-batch that a node does within grid[k]."""
    for c in range(out.shape[0]):
        for k in range(out.shape[1]):
            most = 0
            for n in range(1, requests.shape[2]):
                x = min(requests[c, k, n], batch)
                if x >= share and x * n > most:
                    most = x * n
            out[c, k] = most


@compiled
def rank(classes: Ints, count: int, binomial: Ints, first: Ints) -> int:
    """Number of a multiset of classes (rising) among all, smaller ones first."""
    number = first[count]
    for i in range(count):
        number += binomial[classes[i] + i, i + 1]
    return number


@compiled
def best_splits(
    members: Ints, shape: Shape, best: Floats, binomial: Ints, first: Ints, out: Floats,
    value: Floats, classes: Ints,
) -> None:  # fmt: skip
    """out[row]: largest best[A] + best[B] over the splits of a combination into A and B."""
    whole = shape.sizes.shape[0] - 1
    for row in range(members.shape[0]):
        for s in range(1, whole):
            count = 0
            for i in range(shape.counts.shape[0]):
                for _ in range(shape.digits[s, i]):
                    classes[count] = members[row, i]
                    count += 1
            value[s] = best[rank(classes, count, binomial, first)]
        most = 0.0
        for s in range(1, whole):
            most = max(most, value[s] + value[whole - s])
        out[row] = most

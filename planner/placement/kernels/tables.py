"""Tables made once per phase: quantised relaxations, and floors from smaller combinations."""

from __future__ import annotations

from planner.perf.grids import Floats
from planner.placement.kernels.compiled import compiled, entry
from planner.placement.kernels.types import NOWHERE, Ints, Nodes, Shape


@entry
def fill_requests(
    nodes: Nodes, grid: Floats, micro_batches: int, width: int, most: int, out: Ints
) -> None:
    """out[c, k, n]: most requests of a node within grid[k] in options of up to `width` groups."""
    for c in range(out.shape[0]):
        for n in range(1, out.shape[2]):
            moved = nodes.network_ms[c, NOWHERE, n]
            for o in range(nodes.options[c]):
                dp = nodes.dp[c, o]
                if dp > width:
                    continue
                limit = min(nodes.room[c, o, NOWHERE, n] // micro_batches, most)
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


@entry
def fill_layer_requests(nodes: Nodes, grid: Floats, most: int, out: Ints) -> None:
    """out[c, k]: most requests of a node for which one layer takes at most grid[k]."""
    for c in range(out.shape[0]):
        for o in range(nodes.options[c]):
            g = 0
            for k in range(grid.shape[0]):
                while g < most and nodes.latency_ms[c, o, g + 1] <= grid[k]:
                    g += 1
                out[c, k] = max(out[c, k], min(g * nodes.dp[c, o], most))


@entry
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
def _rank(classes: Ints, count: int, binomial: Ints, first: Ints) -> int:
    """Number of a multiset of classes (rising) among all, smaller ones first."""
    number = first[count]
    for i in range(count):
        number += binomial[classes[i] + i, i + 1]
    return number


@entry
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
            value[s] = best[_rank(classes, count, binomial, first)]
        most = 0.0
        for s in range(1, whole):
            most = max(most, value[s] + value[whole - s])
        out[row] = most

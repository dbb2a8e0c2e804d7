"""Records of arrays that the kernels share, and their constants."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from planner.perf.grids import Floats

Ints = NDArray[Any]

ONLY, FIRST, MIDDLE, LAST, NOWHERE = range(5)  # roles
DECODE, PREFILL, AGGREGATED = range(3)  # kinds
WORK, LAYERS, LATENCY, SEARCHED, GAINED = range(5)  # how a combination ended, by rising effort

MOST_NODES = 8  # of a combination


class Nodes(NamedTuple):
    """All node classes."""

    options: Ints  # [c] how many
    dp: Ints  # [c, o]
    layer_ms: Floats  # [c, o, g]
    head_ms: Floats  # [c, o, g]
    latency_ms: Floats  # [c, o, g] of one layer, with a p95 request
    overhead_ms: Floats  # [c, o]
    room: Ints  # [c, o, r, n] requests in flight of one group (P4)
    network_ms: Floats  # [c, r, n] per request
    most: Ints  # [c, n] requests that the KV hand-over allows
    peak_gbit_per_s: Floats  # [c]


class Terms(NamedTuple):
    """Scalars of the phase."""

    kind: int
    layers: int
    budget_ms: float  # prefill: of the summed latency
    hop_latency_ms: float
    hop_ms_per_bit: float  # beside the network's own
    hop_bits: float  # of one request
    hop_bits_extra: float
    tolerance: float  # relative, of the search
    least_gain: float  # relative, of a placement above its floor


class Pairs(NamedTuple):
    """The pairs (M, b) and, for aggregated serving, least shares."""

    micro_batches: Ints  # [p]
    batch: Ints  # [p]
    least_share: Ints  # [p]
    limit_ms: Floats  # [p] longest cycle (P5); prefill: longest step
    rps_ms: Floats  # [p] throughput x cycle
    table: Ints  # [p] which table of `Bounds.requests` holds for the pair


class Bounds(NamedTuple):
    """Quantised relaxations: index k stands for every time up to grid[k]."""

    grid: Floats  # [k] ms, geometric
    requests: Ints  # [table, c, k, n] most requests of a node without embedding, head and hops
    layer_grid: Floats  # [k] ms, finer
    layer_requests: Ints  # [c, k] most requests with a layer below layer_grid[k], memory apart
    work: Floats  # [p, c, k] most request-layers of a node


class Shape(NamedTuple):
    """Subsets of combinations with given multiplicities."""

    counts: Ints  # [i]
    digits: Ints  # [s, i]
    sizes: Ints  # [s]
    starts: Ints  # [s + 1] into parts
    parts: Ints  # subsets t of s, t != 0, by s


class Split(NamedTuple):
    """Work space of one stage's split: requests per group by [i, o]."""

    low: Ints
    middle: Ints
    high: Ints
    room: Ints
    space: Ints


class Scratch(NamedTuple):
    """Work space of one combination, reused."""

    reach: Ints  # [i, r, n] requests of a node under the cap, -1 unknown
    slots: Floats  # [i, r, n, x] prefill: latency of the x-th prompt
    most_layers: Ints  # [r, s]
    cost: Floats  # [r, s, n] ms, -1 unknown
    middle: Ints  # [s] most layers of middle stages
    first: Ints  # [s] most layers of a first and middle stages
    rest: Ints  # [s] most layers of middle stages and a last one
    best: Floats  # [s, n] least latency of a first and middle stages
    from_subset: Ints  # [s, n]
    from_layers: Ints  # [s, n]
    relaxed: Ints  # [s]
    slope: Floats  # [s] least ms per layer of a stage
    head: Floats  # [s] least ms of the head
    value: Floats  # [s]
    with_first: Floats  # [s]
    split: Split
    alive: Ints  # [p] pairs that relaxations leave
    shortest: Floats  # [p] and the shortest cycles of theirs
    stages: Ints  # subsets of a pipeline, in order
    layers: Ints


class Case(NamedTuple):
    """Everything about combinations of one shape."""

    nodes: Nodes
    terms: Terms
    bounds: Bounds
    pairs: Pairs
    shape: Shape
    work: Scratch
    shared: Floats  # [p, group, r, n] cost of groups of one and two nodes, 0 unknown


class Load(NamedTuple):
    """One pair on one combination."""

    p: int
    micro_batches: int
    stretch: int  # cycle over slowest step: M in cycles, 1 for prefill
    batch: int
    share: int
    hop_ms: float
    once_ms: float  # least overhead of a step


class Results(NamedTuple):
    """One row per combination."""

    code: Ints
    rps: Floats
    pair: Ints
    cycle_ms: Floats
    stages: Ints  # how many
    subsets: Ints  # [row, stage]
    stage_layers: Ints  # [row, stage]
    searches: Ints

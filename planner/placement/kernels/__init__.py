"""Compiled inner loops of the exact placement solver; `planner/placement/exact.py` is the way in.

A combination of one *shape* (how often its distinct classes occur) has subsets numbered in mixed
radix: `digits[s, i]` nodes of its i-th class, so that `s - t` is the number of "s without t".
Indices: class c, option o, role r, layers n, requests x, requests per group g, subset s or t,
distinct class i of the combination, pair p, grid step k. Source: docs/formulation.md, section 3.
"""

from planner.placement.kernels.solve import solve
from planner.placement.kernels.tables import (
    best_splits,
    fill_layer_requests,
    fill_requests,
    fill_work,
)
from planner.placement.kernels.types import (
    AGGREGATED,
    DECODE,
    GAINED,
    LATENCY,
    LAYERS,
    MOST_NODES,
    PREFILL,
    SEARCHED,
    WORK,
    Bounds,
    Case,
    Nodes,
    Pairs,
    Results,
    Scratch,
    Shape,
    Split,
    Terms,
)

__all__ = [
    "AGGREGATED",
    "DECODE",
    "GAINED",
    "LATENCY",
    "LAYERS",
    "MOST_NODES",
    "PREFILL",
    "SEARCHED",
    "WORK",
    "Bounds",
    "Case",
    "Nodes",
    "Pairs",
    "Results",
    "Scratch",
    "Shape",
    "Split",
    "Terms",
    "best_splits",
    "fill_layer_requests",
    "fill_requests",
    "fill_work",
    "solve",
]

"""Helix's objective of a placement: the maximum flow of tokens through nodes and links.

A node takes in a token at any of its layers and passes it on after its last one, so a token may
use fewer layers of a node than it holds. Source: Helix (ASPLOS'25), its linear program for given
layers; docs/formulation.md, section 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from scipy import sparse

from planner.errors import InfeasiblePlanError, InputError
from planner.placement.rates import RatePipeline, RateTable
from planner.programs import Program, solve_program

SOURCE, SINK = "source", "sink"  # both are the coordinator

LinkRate = Callable[[str, str], float]  # tokens/s from one node (or SOURCE) to another (or SINK)


@dataclass(frozen=True, slots=True)
class NodeLayers:
    """One node, its layers [first, end) and what it serves holding so many."""

    node: str
    first: int
    end: int
    tokens_per_s: float


def max_flow(nodes: Sequence[NodeLayers], layers: int, link: LinkRate) -> float:
    """Tokens/s from source to sink.

    Raises InputError: a node with layers that the model does not have.
    """
    flows = link_flows(nodes, layers, link)
    return sum(rate for (start, _), rate in flows.items() if start == SOURCE)


def link_flows(
    nodes: Sequence[NodeLayers], layers: int, link: LinkRate
) -> dict[tuple[str, str], float]:
    """Tokens/s of every link that can be used, by its ends, in a flow from source to sink.

    Variables  flow[i, j] >= 0 tokens/s, at most link(i, j): from the source to nodes with layer 0,
               from i to j where first[j] <= end[i] < end[j], to the sink from nodes with layer L
    Maximise   sum over j of flow[source, j]
    Such that  what enters a node leaves it, and is at most its throughput
    Raises     InputError: a node with layers that the model does not have.
    """
    for node in nodes:
        if not 0 <= node.first < node.end <= layers:
            raise InputError(
                f"node {node.node} holds layers {node.first} to {node.end} of {layers}; "
                "give layers that the model has"
            )
    edges = _edges(nodes, layers)
    if not edges:
        return {}
    names = [(_name(nodes, a, SOURCE), _name(nodes, b, SINK)) for a, b in edges]
    count = len(nodes)
    balance = np.zeros((count, len(edges)))
    entering = np.zeros((count, len(edges)))
    for column, (start, end) in enumerate(edges):
        if end >= 0:
            balance[end, column] += 1.0
            entering[end, column] = 1.0
        if start >= 0:
            balance[start, column] -= 1.0
    program = Program(
        matrix=sparse.csc_array(np.vstack([balance, entering])),
        cost=np.array([-1.0 if start < 0 else 0.0 for start, _ in edges]),
        lower=np.zeros(len(edges)),
        upper=np.array([link(start, end) for start, end in names]),
        row_lower=np.concatenate([np.zeros(count), np.full(count, -np.inf)]),
        row_upper=np.concatenate([np.zeros(count), [node.tokens_per_s for node in nodes]]),
        integer=np.zeros(len(edges), dtype=bool),
    )
    rates = solve_program(program, relax=True).values
    if rates is None:  # no flow at all is one
        raise InfeasiblePlanError("the flow through the nodes has no solution: a defect of Coral's")
    return dict(zip(names, map(float, rates), strict=True))


def nodes_of(
    table: RateTable,
    pipelines: Sequence[RatePipeline],
    ids: Mapping[str, Mapping[str, Sequence[str]]],
) -> list[NodeLayers]:
    """Nodes of replicas on disjoint machines, stages one after another in the order given.

    `ids` has the nodes by region ("" without regions) and machine type, taken in their order.
    """
    free = {(region, machine): iter(found) for region, of_region in ids.items()
            for machine, found in of_region.items()}  # fmt: skip
    nodes = []
    for pipeline in pipelines:
        first = 0
        for stage in pipeline.stages:
            for machine, count in stage.machines:
                rate = table.tokens_per_s[machine][stage.layers - 1]
                for node in islice(free[stage.region, machine], count):
                    nodes.append(NodeLayers(node, first, first + stage.layers, rate))
            first += stage.layers
    return nodes


def _edges(nodes: Sequence[NodeLayers], layers: int) -> list[tuple[int, int]]:
    """Pairs of node numbers; -1 is the source as a start and the sink as an end."""
    edges = [(-1, j) for j, node in enumerate(nodes) if node.first == 0]
    edges += [(i, -1) for i, node in enumerate(nodes) if node.end == layers]
    edges += [
        (i, j)
        for i, one in enumerate(nodes)
        for j, other in enumerate(nodes)
        if other.first <= one.end < other.end
    ]
    return edges


def _name(nodes: Sequence[NodeLayers], number: int, outside: str) -> str:
    return outside if number < 0 else nodes[number].node

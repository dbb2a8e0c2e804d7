"""Numbers of an allocation input as arrays: demand, stock, and what templates need and serve.

Domains and classes are in the order of `domains` and `classes`, the rest in the input's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from planner.allocation.problem import AllocationInput, StockKey, stock_key
from planner.perf.grids import Floats
from planner.programs import Rows
from planner.types import Phase

PHASES = (Phase.PREFILL, Phase.DECODE, Phase.AGGREGATED)
INFINITE = np.inf


class Numbers:
    """Of one input; each array is made when it is asked for first."""

    def __init__(self, data: AllocationInput) -> None:
        self.data = data
        self.domains = data.domains
        self.classes = sorted({offer.node_class for offer in data.offers})

    @cached_property
    def demand(self) -> Floats:
        return np.array([workload.demand_rps for workload in self.data.workloads])

    @cached_property
    def weight(self) -> Floats:
        return np.array([workload.weight for workload in self.data.workloads])

    @cached_property
    def largest_rps(self) -> Floats:
        """What a domain may serve of a workload, shape (w, r): residency and A9."""
        rules = [self.data.rules_of(w.name) for w in self.data.workloads]
        share = np.array(
            [
                [rule.largest_domain_share * self.data.may_serve(w.name, r) for r in self.domains]
                for w, rule in zip(self.data.workloads, rules, strict=True)
            ]
        )
        shape = (self.demand.size, len(self.domains))
        largest: Floats = share.reshape(shape) * self.demand[:, None]
        return largest

    @cached_property
    def stocks(self) -> Mapping[StockKey, list[int]]:
        """Offers by what shares one stock (A2)."""
        shared: dict[StockKey, list[int]] = {}
        for number, offer in enumerate(self.data.offers):
            shared.setdefault(stock_key(offer), []).append(number)
        return dict(sorted(shared.items()))

    @cached_property
    def place(self) -> Rows:
        """Row of A1 of every offer: its domain and class."""
        return np.array(
            [
                self.domains.index(o.domain) * len(self.classes) + self.classes.index(o.node_class)
                for o in self.data.offers
            ],
            dtype=np.intp,
        )

    @cached_property
    def available(self) -> Floats:
        """Nodes of each class that the offers of a domain can give together, shape (r, c)."""
        nodes = np.zeros(len(self.domains) * len(self.classes))
        for numbers in self.stocks.values():
            nodes[self.place[numbers[0]]] += self.stock_of(numbers)
        return nodes.reshape(len(self.domains), len(self.classes))

    def stock_of(self, numbers: list[int]) -> int:
        """Nodes of offers that share one stock."""
        return max(self.data.offers[n].stock for n in numbers)

    @cached_property
    def counts(self) -> Floats:
        """Nodes of each class in a template, shape (t, c); inf of a class nobody offers."""
        known = {name: c for c, name in enumerate(self.classes)}
        counts = np.zeros((len(self.data.templates), len(self.classes)))
        for t, template in enumerate(self.data.templates):
            for name, count in template.combination:
                if name in known:
                    counts[t, known[name]] = count
                else:
                    counts[t] = INFINITE
                    break
        return counts

    @cached_property
    def rates(self) -> Floats:
        """T[t, w], shape (t, w), requests/s."""
        known = {workload.name: w for w, workload in enumerate(self.data.workloads)}
        rates = np.zeros((len(self.data.templates), len(known)))
        for t, template in enumerate(self.data.templates):
            for name, rps in template.serves.items():
                if name in known:
                    rates[t, known[name]] = rps
        return rates

    @cached_property
    def phases(self) -> Rows:
        """Position of every template's phase in PHASES."""
        return np.array([PHASES.index(t.phase) for t in self.data.templates], dtype=np.intp)

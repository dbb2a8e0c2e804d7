"""The allocation program as arrays: A0 to A11 as in `problem.py`, for very many columns.

A template that serves one workload has no load variable: its replicas' throughput goes straight
into A5, and at most what the domain may serve of the workload does (more serves nobody, and the
relaxation is the tighter for it). Source: docs/formulation.md, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from planner.allocation.limits import (
    Limit,
    budget_limit,
    least_served_limit,
    quota_limit,
    spot_share_limit,
    spread_limit,
    stock_limit,
)
from planner.allocation.numbers import INFINITE, PHASES, Numbers
from planner.allocation.plan import Plan
from planner.allocation.problem import (
    AllocationInput,
    NodeKey,
    node_key,
    stock_key,
)
from planner.perf.grids import Floats
from planner.programs import Program, Rows
from planner.types import Market

NONE = -1  # domain or workload of a column that has none


class Parts(NamedTuple):
    """Columns of the program by what they are."""

    replicas: Rows  # x[t, r]
    load: Rows  # z[w, t, r], of templates that serve several workloads
    nodes: Rows  # y[r, n, k], in the order of the offers
    new: Rows  # newnode and drop, of offers with nodes that run
    dropped: Rows
    ended: Rows  # replicas that run, in the order of `running`
    paired: Rows  # q[w, r]
    mixed: Rows  # aggregated requests/s served of (w, r)
    short: Rows
    missed: Rows  # short[w] beyond what A11 allows: zero, but where its reach is asked


class AllocationModel(Numbers):
    """The program of one allocation input, and the way back from its columns.

    Columns: `parts`; `template`, `domain` and `workload` of each, or -1.
    Rows: `limits` by row; `shortfall_row` holds sum weight x short.
    Cost vectors, one entry per column: `program.cost` (A0, USD over the horizon) and `shortfall`
    (weighted requests/s).
    """

    def __init__(self, data: AllocationInput) -> None:
        super().__init__(data)
        self.limits: dict[int, Limit] = {}
        self._lower: list[Floats] = []
        self._upper: list[Floats] = []
        self._entries: list[tuple[Rows, Rows, Floats]] = []
        self._find_columns()
        self._node_rows()
        self._capacity_rows()
        self._stock_rows()
        self._change_rows()
        self._demand_rows()
        self._option_rows()
        self._finish()

    @property
    def _has_spot_share(self) -> bool:
        return self.data.options.largest_spot_share < 1.0

    # Columns.

    def _find_columns(self) -> None:
        templates, domains = len(self.data.templates), len(self.domains)
        fits = np.empty((templates, domains), dtype=bool)
        for r in range(domains):
            fits[:, r] = (self.counts <= self.available[r]).all(axis=1)
        serves = (self.rates > 0).astype(int) @ (self.largest_rps > 0).astype(int)
        template, domain = np.nonzero(fits & (serves > 0))
        several = serves[template, domain] > 1
        shares = (self.rates[template] > 0) & (self.largest_rps[:, domain].T > 0)
        owner = shares.argmax(axis=1)
        self.replica_of_load, self._workload_of_load = np.nonzero(shares & several[:, None])
        self._served = np.nonzero(self.largest_rps > 0)  # (w, r) of paired and mixed
        held = [self.data.held.get(node_key(offer), 0) for offer in self.data.offers]
        self._held = np.array(held, dtype=float)
        self._moved = np.flatnonzero(self._held > 0)
        promised = [self.data.rules_of(w.name).least_served > 0 for w in self.data.workloads]
        self._promised = np.flatnonzero(promised)
        offers, pairs = len(self.data.offers), self._served[0].size
        sizes = [
            template.size, self.replica_of_load.size, offers, self._moved.size, self._moved.size,
            len(self.data.running), pairs, pairs, len(self.data.workloads), self._promised.size,
        ]  # fmt: skip
        starts = np.cumsum([0, *sizes])
        self.parts = Parts(
            *(np.arange(start, start + n) for start, n in zip(starts, sizes, strict=False))
        )
        where = self.place // max(1, len(self.classes))
        nothing = np.full(offers + 2 * self._moved.size, NONE)
        self.template = np.full(starts[-1], NONE)
        self.template[self.parts.replicas] = template
        self.template[self.parts.load] = template[self.replica_of_load]
        self.domain = np.concatenate(
            [
                domain, domain[self.replica_of_load], where, where[self._moved],
                where[self._moved],
                self._places(self.domains, [r.domain for r in self.data.running]),
                self._served[1], self._served[1],
                np.full(len(self.data.workloads) + self._promised.size, NONE),
            ]
        )  # fmt: skip
        self.workload = np.concatenate(
            [
                np.where(several, NONE, owner), self._workload_of_load, nothing,
                self._places(
                    [w.name for w in self.data.workloads],
                    [r.template.workload for r in self.data.running],
                ),
                self._served[0], self._served[0], np.arange(len(self.data.workloads)),
                self._promised,
            ]
        )  # fmt: skip

    @staticmethod
    def _places(known: Sequence[str], names: Sequence[str]) -> Rows:
        """Position of each name, or NONE."""
        position = {name: number for number, name in enumerate(known)}
        return np.array([position.get(name, NONE) for name in names], dtype=np.intp)

    @cached_property
    def _columns_at(self) -> Mapping[tuple[str, str], int]:
        """Replica columns by (template id, domain)."""
        x = self.parts.replicas
        places = zip(self.template[x].tolist(), self.domain[x].tolist(), strict=True)
        ids = [template.id for template in self.data.templates]
        return {
            (ids[t], self.domains[r]): column
            for (t, r), column in zip(places, x.tolist(), strict=True)
        }

    @cached_property
    def is_replica(self) -> NDArray[np.bool_]:
        flags = np.zeros(self.template.size, dtype=bool)
        flags[self.parts.replicas] = True
        return flags

    @cached_property
    def loads_of(self) -> Mapping[int, Rows]:
        """Load columns of every replica column that serves several workloads."""
        order = np.argsort(self.replica_of_load, kind="stable")
        numbers, starts = np.unique(self.replica_of_load[order], return_index=True)
        parts = np.split(self.parts.load[order], starts[1:]) if numbers.size else []
        return dict(zip(self.parts.replicas[numbers].tolist(), parts, strict=True))

    @cached_property
    def family(self) -> Rows:
        """Workloads that share replicas as one number, of every column; -1 of nodes."""
        of_workload = np.arange(len(self.data.workloads))
        for row in self.rates[np.unique(self.template[self.parts.load])] > 0:
            joined = np.unique(of_workload[row])
            of_workload[np.isin(of_workload, joined)] = joined[0]
        family = np.where(self.workload == NONE, NONE, of_workload[self.workload])
        shared = self.parts.replicas[self.workload[self.parts.replicas] == NONE]
        owners = (self.rates[self.template[shared]] > 0).argmax(axis=1)
        family[shared] = of_workload[owners]
        return family

    # Rows.

    def _rows(self, number: int, lower: float | Floats, upper: float | Floats) -> Rows:
        first = sum(part.size for part in self._lower)
        self._lower.append(np.broadcast_to(np.asarray(lower, dtype=float), (number,)))
        self._upper.append(np.broadcast_to(np.asarray(upper, dtype=float), (number,)))
        return np.arange(first, first + number)

    def _put(self, rows: Rows, columns: Rows, values: float | NDArray[np.float64]) -> None:
        data = np.broadcast_to(np.asarray(values, dtype=float), rows.shape)
        self._entries.append((rows, columns, data))

    def _node_rows(self) -> None:
        """A1: nodes that replicas use are at most those rented.

        What costs and is not used is not rented, but for room that A8 gives: there they are equal.
        """
        least = 0.0 if self._has_spot_share else -INFINITE
        rows = self._rows(self.available.size, least, 0.0).reshape(self.available.shape)
        x = self.parts.replicas
        counts = self.counts[self.template[x]]
        replica, used = np.nonzero(counts)
        self._put(rows[self.domain[x][replica], used], x[replica], counts[replica, used])
        self._put(self.place, self.parts.nodes, -1.0)
        self.node_rows = rows

    def _capacity_rows(self) -> None:
        """A4 and A5."""
        w_of, r_of = self._served
        x, z = self.parts.replicas, self.parts.load
        rows = np.full((len(self.data.workloads), len(self.domains), len(PHASES)), NONE)
        rows[w_of, r_of] = self._rows(3 * w_of.size, 0.0, INFINITE).reshape(-1, 3)
        for phase, columns in enumerate((self.parts.paired, self.parts.paired, self.parts.mixed)):
            self._put(rows[w_of, r_of, phase], columns, -1.0)
        alone = x[self.workload[x] != NONE]
        w, r, t = self.workload[alone], self.domain[alone], self.template[alone]
        served = np.minimum(self.rates[t, w], self.largest_rps[w, r])
        self._put(rows[w, r, self.phases[t]], alone, served)
        shared = np.unique(self.replica_of_load)
        busy = self._rows(shared.size, -INFINITE, 0.0)
        self._put(busy, x[shared], -1.0)
        t, w = self.template[z], self._workload_of_load
        self._put(busy[np.searchsorted(shared, self.replica_of_load)], z, 1.0 / self.rates[t, w])
        self._put(rows[w, self.domain[z], self.phases[t]], z, 1.0)
        # What a replica could serve beyond the workload's demand serves nobody here either.
        most = self.largest_rps[w, self.domain[z]]
        ample = np.flatnonzero(self.rates[t, w] > most)
        tight = self._rows(ample.size, -INFINITE, 0.0)
        self._put(tight, z[ample], 1.0)
        self._put(tight, x[self.replica_of_load[ample]], -most[ample])

    def _stock_rows(self) -> None:
        """A2."""
        for numbers in self.stocks.values():
            stock = self.stock_of(numbers)
            row = self._rows(1, -INFINITE, stock)
            self._put(np.repeat(row, len(numbers)), self.parts.nodes[numbers], 1.0)
            self.limits[int(row[0])] = stock_limit(self.data.offers[numbers[0]], stock)

    def _change_rows(self) -> None:
        """A3; where nothing runs every node is new, and its cost says so."""
        parts, held = self.parts, self._held[self._moved]
        rows = self._rows(held.size, -held, INFINITE)  # newnode - y >= -held
        self._put(rows, parts.new, 1.0)
        self._put(rows, parts.nodes[self._moved], -1.0)
        rows = self._rows(held.size, held, INFINITE)  # drop + y >= held
        self._put(rows, parts.dropped, 1.0)
        self._put(rows, parts.nodes[self._moved], 1.0)
        running = self.data.running  # ended + x >= running
        rows = self._rows(len(running), np.array([float(r.count) for r in running]), INFINITE)
        self._put(rows, parts.ended, 1.0)
        at = [self._columns_at.get((r.template.id, r.domain), NONE) for r in running]
        known = np.flatnonzero(np.array(at, dtype=np.intp) != NONE)
        self._put(rows[known], np.array(at, dtype=np.intp)[known], 1.0)

    def _demand_rows(self) -> None:
        """A6, and the row that holds the weighted shortfall."""
        rows = self._rows(self.demand.size, self.demand, INFINITE)
        self._put(rows, self.parts.short, 1.0)
        for columns in (self.parts.paired, self.parts.mixed):
            self._put(rows[self._served[0]], columns, 1.0)
        row = self._rows(1, -INFINITE, INFINITE)
        self._put(np.repeat(row, self.weight.size), self.parts.short, self.weight)
        self.shortfall_row = int(row[0])
        self.demand_rows = rows

    def _option_rows(self) -> None:
        """A7 to A11."""
        data, options, y = self.data, self.data.options, self.parts.nodes
        for quota in options.quotas:
            used = [o.vcpus * quota.covers(o) for o in data.offers]
            self._limit(quota_limit(quota, data.offers), y, used)
        rented = [o for o in data.offers if o.market is not Market.OWNED]
        share = options.largest_spot_share
        if share < 1.0:
            weights = [
                o.gpus * ((o.market is Market.SPOT) - share) * (o.market is not Market.OWNED)
                for o in data.offers
            ]
            self._limit(spot_share_limit(share, rented), y, weights)
        for n, (w, r) in enumerate(zip(*self._served, strict=True)):
            workload = data.workloads[w]
            largest = data.rules_of(workload.name).largest_domain_share
            if largest < 1.0:
                columns = np.array([self.parts.paired[n], self.parts.mixed[n]])
                self._limit(spread_limit(workload, largest, self.domains[r]), columns, [1.0, 1.0])
        if options.budget_usd_per_hour is not None:
            prices = [o.price_usd_per_hour for o in data.offers]
            self._limit(budget_limit(options.budget_usd_per_hour, rented), y, prices)
        for missed, w in zip(self.parts.missed, self._promised, strict=True):
            workload = data.workloads[w]
            limit = least_served_limit(workload, data.rules_of(workload.name).least_served)
            self._limit(limit, np.array([self.parts.short[w], missed]), [1.0, -1.0])

    def _limit(self, limit: Limit, columns: Rows, values: Sequence[float]) -> None:
        row = self._rows(1, -INFINITE, limit.amount)
        used = np.array(values, dtype=float)
        counted = np.flatnonzero(used)
        self._put(np.repeat(row, counted.size), columns[counted], used[counted])
        self.limits[int(row[0])] = limit

    def _finish(self) -> None:
        data, parts, settings = self.data, self.parts, self.data.settings
        total = self.template.size
        cost, upper = np.zeros(total), np.full(total, INFINITE)
        price = np.array([offer.price_usd_per_hour for offer in data.offers])
        start = settings.startup_minutes / 60.0 * price
        cost[parts.nodes] = settings.horizon_hours * price + np.where(self._held > 0, 0.0, start)
        cost[parts.new] = start[self._moved]
        cost[parts.dropped] = settings.drain_minutes / 60.0 * price[self._moved]
        cost[parts.ended] = [data.restart_usd(r.template, r.domain) for r in data.running]
        egress = [
            3600.0 * settings.horizon_hours
            * data.egress_usd_per_request(data.workloads[w], self.domains[r])
            for w, r in zip(*self._served, strict=True)
        ]  # fmt: skip
        cost[parts.paired] = cost[parts.mixed] = egress
        x = parts.replicas
        counts, room = self.counts[self.template[x]], self.available[self.domain[x]]
        # Where a row says the same as a bound, the row has the price: what one more is worth.
        most = np.full(counts.shape, INFINITE)
        np.divide(room, counts, out=most, where=counts > 0)
        most = most.min(axis=1, initial=INFINITE)
        whole = np.floor(most + 1e-9)
        loose = (most <= whole + 1e-9) & (not self._has_spot_share)
        upper[x] = np.where(loose, INFINITE, whole)
        spread = np.array(
            [data.rules_of(w.name).largest_domain_share < 1.0 for w in data.workloads]
        )
        largest = np.where(spread[self._served[0]], INFINITE, self.largest_rps[self._served])
        upper[parts.paired] = upper[parts.mixed] = largest
        shared = np.array([self.stock_of(self.stocks[stock_key(o)]) for o in data.offers])
        own = np.array([float(o.stock) for o in data.offers])
        upper[parts.nodes] = np.where(own < shared, own, INFINITE)
        upper[parts.short] = self.demand
        upper[parts.missed] = 0.0
        integer = np.zeros(total, dtype=bool)
        integer[parts.replicas] = integer[parts.nodes] = True
        lower, top = np.concatenate(self._lower), np.concatenate(self._upper)
        rows, columns, values = (np.concatenate(p) for p in zip(*self._entries, strict=True))
        matrix = sparse.coo_array((values, (rows, columns)), shape=(lower.size, total)).tocsc()
        self.program = Program(matrix, cost, np.zeros(total), upper, lower, top, integer)
        self.shortfall = np.zeros(total)
        self.shortfall[parts.short] = self.weight

    def fulfilling(self, cost: Floats) -> Program:
        """The program with another objective, and A11 broken where it must be."""
        upper = self.program.upper.copy()
        upper[self.parts.missed] = INFINITE
        return replace(self.program, cost=cost, upper=upper)

    def nothing(self) -> Floats:
        """The plan that rents nothing: what runs is given back."""
        values = np.zeros(self.template.size)
        values[self.parts.dropped] = self._held[self._moved]
        values[self.parts.ended] = [running.count for running in self.data.running]
        values[self.parts.short] = self.demand
        return values

    def values_of(self, plan: Plan) -> Floats:
        """A plan of the same input as values of all columns.

        Replicas without a column (nothing may be served by them any more) are left out.
        """
        parts, values = self.parts, np.zeros(self.template.size)
        workloads = {w.name: n for n, w in enumerate(self.data.workloads)}
        domains = {name: r for r, name in enumerate(self.domains)}
        x = parts.replicas
        loads = {
            (int(x[replica]), int(self.workload[z])): z
            for replica, z in zip(self.replica_of_load.tolist(), parts.load.tolist(), strict=True)
        }
        served = np.zeros((len(workloads), len(domains), len(PHASES)))
        for planned in plan.replicas:
            r, phase = domains[planned.domain], PHASES.index(planned.template.phase)
            column = self._columns_at.get((planned.template.id, planned.domain))
            if column is None:
                continue
            values[column] = planned.count
            for name, rps in planned.load_rps.items():
                served[workloads[name], r, phase] += rps
                if (column, workloads[name]) in loads:
                    values[loads[column, workloads[name]]] = rps
        w_of, r_of = self._served
        values[parts.paired] = served[w_of, r_of][:, :2].min(axis=1)
        values[parts.mixed] = served[w_of, r_of, 2]
        running = plan.node_counts
        counts = np.array([running.get(node_key(o), 0) for o in self.data.offers], dtype=float)
        change = (counts - self._held)[self._moved]
        values[parts.nodes] = counts
        values[parts.new] = np.maximum(change, 0.0)
        values[parts.dropped] = np.maximum(-change, 0.0)
        kept = plan.replica_counts
        values[parts.ended] = [
            max(0, r.count - kept.get((r.template.id, r.domain), 0)) for r in self.data.running
        ]
        values[parts.short] = [service.short_rps for service in plan.services]
        return values

    # The way back.

    def replicas_of(self, values: Floats) -> dict[tuple[int, str], int]:
        """Replicas by (template index, domain) of a solution."""
        return {
            (int(self.template[x]), self.domains[self.domain[x]]): round(values[x])
            for x in self.parts.replicas[values[self.parts.replicas] > 0.5].tolist()
        }

    def nodes_of(self, values: Floats) -> dict[NodeKey, int]:
        """Nodes by offer of a solution."""
        counts = np.rint(values[self.parts.nodes]).astype(int).tolist()
        return {node_key(o): n for o, n in zip(self.data.offers, counts, strict=True)}

"""What if prices, stock or demand were others: changes of an allocation's input, from CSV files.

A file says what it changes by its last column; the columns before say where, and one that is not
there, empty or `*` means everywhere (patterns as in a shell):

    prices   domain, instance_type, node_class, market; price_usd_per_hour or price_factor
    stock    domain, instance_type, node_class; stock or stock_factor
    demand   workload; requests_per_s or demand_factor
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import polars as pl

from planner.allocation.problem import AllocationInput
from planner.errors import InputError
from planner.types import Market, Offer, Workload


class WhatIfError(InputError):
    """A file of changes that can't be read, or changes nothing."""


@dataclass(frozen=True)
class _Row:
    """One line of a file."""

    where: Mapping[str, str]  # column -> pattern, those that say something
    value: float
    text: str  # for messages: 'prices.csv, line 3'

    def covers(self, **names: str) -> bool:
        return all(fnmatchcase(names[key], pattern) for key, pattern in self.where.items())


def change_input(data: AllocationInput, files: Sequence[Path]) -> AllocationInput:
    """The input with every file's changes, in order.

    Raises WhatIfError: a file that is not there or not of one of the kinds, a value that is no
    number, negative, or a price of zero, or a line that matches nothing.
    """
    for file in files:
        kind, rows = _read(file)
        for row in rows:
            data = _CHANGES[kind](data, row)
    return data


def _set_price(data: AllocationInput, row: _Row) -> AllocationInput:
    return _offers(data, row, lambda offer: replace(offer, price_usd_per_hour=_positive(row)))


def _scale_price(data: AllocationInput, row: _Row) -> AllocationInput:
    def change(offer: Offer) -> Offer:
        return replace(offer, price_usd_per_hour=offer.price_usd_per_hour * _positive(row))

    return _offers(data, row, change)


def _set_stock(data: AllocationInput, row: _Row) -> AllocationInput:
    return _offers(data, row, lambda offer: _with_stock(offer, row.value))


def _scale_stock(data: AllocationInput, row: _Row) -> AllocationInput:
    return _offers(data, row, lambda offer: _with_stock(offer, offer.stock * row.value))


def _with_stock(offer: Offer, stock: float) -> Offer:
    return replace(offer, stock=math.floor(stock + 1e-9), stock_source="what-if")


def _set_demand(data: AllocationInput, row: _Row) -> AllocationInput:
    return _workloads(data, row, lambda workload: row.value)


def _scale_demand(data: AllocationInput, row: _Row) -> AllocationInput:
    return _workloads(data, row, lambda workload: workload.demand_rps * row.value)


_CHANGES: Mapping[str, Callable[[AllocationInput, _Row], AllocationInput]] = {
    "price_usd_per_hour": _set_price,
    "price_factor": _scale_price,
    "stock": _set_stock,
    "stock_factor": _scale_stock,
    "requests_per_s": _set_demand,
    "demand_factor": _scale_demand,
}


_PLACES: Mapping[str, tuple[str, ...]] = {
    "price": ("domain", "instance_type", "node_class", "market"),
    "stock": ("domain", "instance_type", "node_class"),
    "requests": ("workload",),
    "demand": ("workload",),
}


def _offers(data: AllocationInput, row: _Row, change: Callable[[Offer], Offer]) -> AllocationInput:
    def covered(offer: Offer) -> bool:
        return row.covers(
            domain=offer.domain,
            instance_type=offer.instance_type,
            node_class=offer.node_class,
            market=offer.market.value,
        )

    rented = [o for o in data.offers if o.market is not Market.OWNED and covered(o)]
    if not rented:
        raise WhatIfError(
            f"{row.text}: no offer of the scenario matches {_patterns(row)}; see them with "
            'coral sql "FROM latest_price"'
        )
    changed = set(map(id, rented))
    return replace(data, offers=tuple(change(o) if id(o) in changed else o for o in data.offers))


def _workloads(
    data: AllocationInput, row: _Row, change: Callable[[Workload], float]
) -> AllocationInput:
    names = [w.name for w in data.workloads if row.covers(workload=w.name)]
    if not names:
        known = ", ".join(w.name for w in data.workloads)
        raise WhatIfError(f"{row.text}: no workload matches {_patterns(row)}; there are {known}")
    return replace(
        data,
        workloads=tuple(
            replace(w, demand_rps=change(w)) if w.name in names else w for w in data.workloads
        ),
    )


def _patterns(row: _Row) -> str:
    return " ".join(f"{key}={value}" for key, value in row.where.items()) or "anything"


def _positive(row: _Row) -> float:
    if row.value == 0.0:
        raise WhatIfError(f"{row.text}: a price must be positive, got 0; no node is free")
    return row.value


def _read(file: Path) -> tuple[str, list[_Row]]:
    try:
        table = pl.read_csv(file, infer_schema=False)
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).splitlines()[0]
        raise WhatIfError(f"cannot read what-if file {file}: {reason}") from error
    kinds = [name for name in table.columns if name in _CHANGES]
    if len(kinds) != 1:
        raise WhatIfError(
            f"{file}: one column must say what changes ({', '.join(_CHANGES)}), "
            f"found {', '.join(kinds) or 'none'}"
        )
    kind = kinds[0]
    places = _PLACES[kind.split("_")[0]]
    for name in table.columns:
        if name not in {kind, *places}:
            raise WhatIfError(
                f"{file}: unknown column {name!r}; {kind} goes with {', '.join(places)}"
            )
    if not table.height:
        raise WhatIfError(f"{file} has no line below its header")
    return kind, [
        _row(kind, cells, f"{file}, line {line}")
        for line, cells in enumerate(table.iter_rows(named=True), start=2)
    ]


def _row(kind: str, cells: Mapping[str, str | None], text: str) -> _Row:
    try:
        value = float(cells[kind] or "")
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0.0):
        raise WhatIfError(f"{text}: {kind} must be a number from 0 up, got {cells[kind] or ''!r}")
    where = {
        key: cell for key, cell in cells.items() if key != kind and cell not in {None, "", "*"}
    }
    return _Row({key: str(cell) for key, cell in where.items()}, value, text)

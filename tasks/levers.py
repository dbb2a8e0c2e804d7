"""Coral with one lever switched off at a time: what each of them saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, stock_key
from planner.allocation.solve import plan_allocation
from planner.baselines.homo_joint import plan_homo_joint
from planner.baselines.sequential import Orders, plan_in_orders
from planner.types import Market, Phase, Template

Planner = Callable[[AllocationInput], Plan | Orders]


def levers(
    data: AllocationInput, whole: Sequence[Template] | None
) -> Iterator[tuple[str, Planner]]:
    """Names and planners; a lever that the input does not have is left out.

    `whole` is the library without node options (None: not to be had, or the same). None of them
    promises least served shares, which a lever may be needed for.
    """

    def with_templates(keep: Callable[[Template], bool]) -> Planner:
        return lambda case: _plan(case, tuple(t for t in case.templates if keep(t)))

    yield "no joint planning", lambda case: plan_in_orders(case, plan_allocation)
    yield "no mixed replicas", plan_homo_joint
    yield "one node per replica", with_templates(lambda t: t.nodes == 1)
    yield "no disaggregation", with_templates(lambda t: t.phase is Phase.AGGREGATED)
    yield "no aggregated serving", with_templates(lambda t: t.phase is not Phase.AGGREGATED)
    if whole is not None:
        yield "no node options", lambda case: _plan(case, tuple(whole))
    if any(template.shared_rps for template in data.templates):
        yield "no shared replicas", _without_sharing
    if {offer.market for offer in data.offers} >= {Market.SPOT, Market.ON_DEMAND}:
        yield "no spot", _without_spot
    if len(data.domains) > 1:
        yield "one domain", _best_domain


def _plan(data: AllocationInput, templates: tuple[Template, ...]) -> Plan:
    return plan_allocation(replace(data.without_promises(), templates=templates))


def _without_sharing(data: AllocationInput) -> Plan:
    """Every replica serves the workload that it was made for."""
    return _plan(data, tuple(replace(t, shared_rps={}) for t in data.templates))


def _without_spot(data: AllocationInput) -> Plan:
    offers = tuple(offer for offer in data.offers if offer.market is not Market.SPOT)
    return _plan(replace(data, offers=offers), data.templates)


def _best_domain(data: AllocationInput) -> Plan:
    """The best plan inside one of the four domains with most GPUs."""
    stock: dict[str, int] = {}
    for offer in {stock_key(offer): offer for offer in data.offers}.values():
        stock[offer.domain] = stock.get(offer.domain, 0) + offer.stock * offer.gpus
    alone = {
        name: replace(rule, largest_domain_share=1.0)
        for name, rule in data.without_promises().rules.items()
    }
    largest = sorted(stock, key=lambda name: (-stock[name], name))[:4]
    settings = replace(data.settings, deadline_s=data.settings.deadline_s / len(largest))
    plans = [
        plan_allocation(
            replace(
                data,
                settings=settings,
                offers=tuple(o for o in data.offers if o.domain == name),
                rules=alone,
            )
        )
        for name in largest
    ]
    return Orders(tuple(plans)).best

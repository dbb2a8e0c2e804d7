"""Coral and the baselines on the same inputs: one scenario, the suite, or a sweep of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl
from prefect import task
from prefect.cache_policies import NO_CACHE

from catalog.store import Catalog
from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput, stock_key
from planner.allocation.solve import plan_allocation
from planner.baselines.cauchy import plan_cauchy
from planner.baselines.homo import plan_homo
from planner.baselines.homo_joint import plan_homo_joint, plan_never_worse
from planner.baselines.sequential import Orders, plan_in_orders
from planner.baselines.single import plan_single
from planner.errors import CoralError
from planner.scenario import ScenarioSpec
from planner.types import Market, Phase, Template
from tasks import progress
from tasks.allocation import allocation_input, read_library
from tasks.comparison_view import CORAL, Line, draw_lines
from tasks.inputs import load_inputs
from tasks.suite import read_suite

SWEEPS: Mapping[str, tuple[float, ...]] = {
    "demand": (0.25, 0.5, 1.0, 2.0, 4.0),
    "stock": (0.25, 0.5, 1.0, 2.0),
}


@dataclass(frozen=True)
class Case:
    """One input that all planners plan."""

    name: str
    group: str  # stratum of the suite, or the value of a sweep
    data: AllocationInput


@dataclass(frozen=True)
class Comparison:
    """All lines, in order, and where they were written."""

    title: str
    lines: tuple[Line, ...]
    table: Path
    plot: Path


Planner = Callable[[AllocationInput], Plan | Orders]

BASELINES: Mapping[str, Planner] = {
    "homo-joint": plan_homo_joint,
    "homo-joint, 2 nodes": lambda data: plan_homo_joint(data, max_nodes=2),
    "homo-joint, 1 node": lambda data: plan_homo_joint(data, max_nodes=1),
    "homo": plan_homo,
    "homo, 1 node": lambda data: plan_homo(data, max_nodes=1),
    "cauchy": plan_cauchy,
    "single": plan_single,
}


def cases_of(
    catalog: Catalog, spec: ScenarioSpec, *, suite: bool, sweep: str | None, deadline_s: float
) -> list[Case]:
    """The scenario alone, over the suite, or over a sweep; all with the scenario's library.

    Raises MarketError: a suite instance or a sweep that leaves nothing to rent.
    """
    library = read_library(catalog, load_inputs(catalog, spec))
    found = []
    for name, group, changed in _specs(spec, suite, sweep):
        data = allocation_input(load_inputs(catalog, changed), library)
        settings = replace(data.settings, deadline_s=deadline_s)
        found.append(Case(name, group, replace(data, settings=settings)))
    if sweep == "domains":
        found = [
            Case(f"{parts} domains", str(parts), fragmented(found[0].data, parts))
            for parts in (1, 2, 4, 8)
        ]
    return found


def _specs(
    spec: ScenarioSpec, suite: bool, sweep: str | None
) -> Iterator[tuple[str, str, ScenarioSpec]]:
    if suite:
        instances = read_suite()
        for instance in instances.instances:
            yield instance.id, instance.stratum, instances.scenario(spec, instance)
    elif sweep == "demand":
        for factor in SWEEPS[sweep]:
            scale = spec.demand_scale * factor
            yield (
                f"demand x {factor:g}",
                f"{factor:g}",
                spec.model_copy(update={"demand_scale": scale}),
            )
    elif sweep == "stock":
        for factor in SWEEPS[sweep]:
            stock = spec.stock.model_copy(update={"factor": spec.stock.factor * factor})
            yield f"stock x {factor:g}", f"{factor:g}", spec.model_copy(update={"stock": stock})
    else:
        yield spec.name, spec.name, spec


def fragmented(data: AllocationInput, parts: int) -> AllocationInput:
    """The same stock and prices in so many domains, dealt out in turn.

    All offers of a type and market become one at the price of the cheapest; where a type has fewer
    nodes than there are domains some have none of it. Quotas by domain and egress are left out.
    """
    merged: dict[tuple[str, Market], tuple[int, float]] = {}
    example = {(o.instance_type, o.market): o for o in data.offers}
    turns = {name: n for n, name in enumerate(sorted({o.instance_type for o in data.offers}))}
    for offer in data.offers:
        stock, price = merged.get((offer.instance_type, offer.market), (0, float("inf")))
        key = (offer.instance_type, offer.market)
        merged[key] = (stock + offer.stock, min(price, offer.price_usd_per_hour))
    offers = []
    for key, (stock, price) in sorted(merged.items()):
        turn = turns[key[0]]  # spot and on-demand share one stock: the same domains for both
        for part in range(parts):
            share = stock // parts + ((part - turn) % parts < stock % parts)
            if share:
                offers.append(
                    replace(example[key], domain=f"part-{part + 1}", zone=None, stock=share,
                            price_usd_per_hour=price)
                )  # fmt: skip
    rules = {name: replace(rule, domains=None, origin=None) for name, rule in data.rules.items()}
    return replace(
        data,
        offers=tuple(offers),
        rules=rules,
        held={},
        options=replace(data.options, quotas=(), egress_usd_per_gib={}),
    )


def levers(data: AllocationInput) -> Iterator[tuple[str, Planner]]:
    """Coral with one lever switched off at a time."""

    def with_templates(keep: Callable[[Template], bool]) -> Planner:
        def plan(case: AllocationInput) -> Plan:
            return plan_allocation(
                replace(case, templates=tuple(t for t in case.templates if keep(t)))
            )

        return plan

    yield "no joint planning", lambda case: plan_in_orders(case, plan_allocation)
    yield "no mixed replicas", plan_homo_joint
    yield "one node per replica", with_templates(lambda t: t.nodes == 1)
    yield "no disaggregation", with_templates(lambda t: t.phase is Phase.AGGREGATED)
    yield "no aggregated serving", with_templates(lambda t: t.phase is not Phase.AGGREGATED)
    if {offer.market for offer in data.offers} >= {Market.SPOT, Market.ON_DEMAND}:
        yield (
            "no spot",
            lambda case: plan_allocation(
                replace(case, offers=tuple(o for o in case.offers if o.market is not Market.SPOT))
            ),
        )
    if len(data.domains) > 1:
        yield "one domain", _best_domain


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


def plan_cases(cases: Sequence[Case], *, ablate: bool = False) -> list[Line]:
    """Every case planned by Coral and by the baselines, or with levers off."""
    lines: list[Line] = []
    done, total = 0, sum(1 + len(_others(case, ablate)) for case in cases)
    for case in cases:
        progress.report("compare", done, total)
        joint = plan_homo_joint(case.data)
        lines.append(_line(case, CORAL, plan_never_worse(case.data, joint)))
        done += 1
        for name, planner in _others(case, ablate).items():
            progress.report("compare", done, total)
            plan = joint if planner is plan_homo_joint else _try(planner, case.data)
            lines.append(_line(case, name, plan))
            done += 1
    progress.report("compare", total, total)
    return lines


def compare(
    catalog: Catalog,
    spec: ScenarioSpec,
    *,
    suite: bool = False,
    sweep: str | None = None,
    ablate: bool = False,
    deadline_s: float = 10.0,
) -> Comparison:
    """Plan every case with Coral and each baseline (or each lever off) and write table and plot."""
    cases = cases_of(catalog, spec, suite=suite, sweep=sweep, deadline_s=deadline_s)
    lines = plan_cases(cases, ablate=ablate)
    kind = "ablation" if ablate else "comparison"
    over = "the suite" if suite else f"{sweep} of {spec.name}" if sweep else spec.name
    title = f"{kind} over {over}"
    folder = catalog.home / "reports"
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{kind}-{spec.name}-{uuid.uuid4().hex[:8]}"
    table, plot = folder / f"{stem}.csv", folder / f"{stem}.png"
    pl.DataFrame(lines).write_csv(table)
    draw_lines(lines, title, plot)
    return Comparison(title, tuple(lines), table, plot)


compare_task = task(name="compare", cache_policy=NO_CACHE)(compare)


def _others(case: Case, ablate: bool) -> Mapping[str, Planner]:
    return dict(levers(case.data)) if ablate else BASELINES


def _try(planner: Planner, data: AllocationInput) -> Plan | Orders | None:
    """None where the planner fails: the others are compared all the same."""
    try:
        return planner(data)
    except CoralError:
        return None


def _line(case: Case, planner: str, found: Plan | Orders | None) -> Line:
    if found is None:
        return Line(case.name, case.group, planner, 0.0, 0.0, 0.0, 0, None, 0.0)
    plans = found.plans if isinstance(found, Orders) else (found,)
    tokens = {w.name: w.lengths.mean_input + w.lengths.mean_output for w in case.data.workloads}
    number = len(plans)
    return Line(
        case=case.name,
        group=case.group,
        planner=planner,
        usd_per_hour=sum(p.cost_usd_per_hour for p in plans) / number,
        served_share=sum(p.served_share for p in plans) / number,
        served_tokens_per_s=sum(
            s.served_rps * tokens[s.workload] for p in plans for s in p.services
        )
        / number,
        nodes=round(sum(n.count for p in plans for n in p.nodes) / number),
        gap=None if isinstance(found, Orders) else found.gap,
        seconds=sum(p.solve_s for p in plans),
    )

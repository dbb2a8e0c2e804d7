"""Coral and the baselines on the same inputs: one scenario, the suite, or a sweep of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import polars as pl

from catalog.store import Catalog
from planner.allocation.plan import Plan
from planner.allocation.problem import AllocationInput
from planner.baselines.cauchy import plan_cauchy
from planner.baselines.homo import plan_homo
from planner.baselines.homo_joint import plan_from, plan_homo_joint
from planner.baselines.sequential import Orders
from planner.baselines.single import plan_single
from planner.engine import Engine, runnable
from planner.errors import CoralError, LeastServedError, ScenarioError
from planner.scenario import ScenarioSpec, with_whole_nodes
from planner.types import Market, Template
from tasks import progress
from tasks.allocation import allocation_input, read_library
from tasks.comparison_plot import draw_lines
from tasks.comparison_simulation import served_in_simulation
from tasks.comparison_view import CORAL, Line
from tasks.coral_task import coral_task
from tasks.inputs import Inputs, load_inputs
from tasks.levers import Planner, levers
from tasks.suite import read_suite

SWEEPS: Mapping[str, tuple[float, ...]] = {
    "demand": (0.25, 0.5, 1.0, 2.0, 4.0),
    "stock": (0.25, 0.5, 1.0, 2.0),
}
DOMAINS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Case:
    """One input that all planners plan."""

    name: str
    group: str  # stratum of the suite, or the value of a sweep
    engine: Engine
    data: AllocationInput
    whole: tuple[Template, ...] | None = None  # the library without node options, for an ablation
    inputs: Inputs | None = None  # what a simulation needs


@dataclass(frozen=True)
class Comparison:
    """All lines, in order, and where they were written."""

    title: str
    ablated: bool
    lines: tuple[Line, ...]
    table: Path
    plot: Path


def engines_of(name: str) -> tuple[Engine, ...]:
    """Both engines of 'both', the one with fewer templates first; else the one of that name."""
    return (Engine.VLLM, Engine.ANY) if name == "both" else (Engine(name),)


def cases_of(
    catalog: Catalog,
    spec: ScenarioSpec,
    engines: Sequence[Engine],
    *,
    suite: bool = False,
    sweep: str | None = None,
    only: str = "*",
    ablate: bool = False,
    deadline_s: float,
) -> list[Case]:
    """The scenario alone, over the suite, or over a sweep; all with the scenario's library.

    `only` is a shell pattern on the names of cases. Where an engine runs no template of a workload,
    that workload is served by no planner.
    Raises MarketError: a suite instance or a sweep that leaves nothing to rent. NoTemplateError:
    the library is not complete, or (for an ablation) the one without node options. ScenarioError:
    no case has such a name.
    """
    spec = spec.model_copy(update={"engine": Engine.ANY})
    library = read_library(catalog, load_inputs(catalog, spec))
    whole = None
    if ablate and spec.placement.node_options != "whole":
        whole = tuple(read_library(catalog, load_inputs(catalog, with_whole_nodes(spec))))
    markets = []
    for name, group, changed in _specs(spec, suite, sweep):
        inputs = load_inputs(catalog, changed)
        data = allocation_input(inputs, library)
        settings = replace(data.settings, deadline_s=deadline_s)
        markets.append((name, group, replace(data, settings=settings), inputs))
    if sweep == "domains":
        _, _, market, inputs = markets[0]
        markets = [
            (f"{n} domain{'s' * (n > 1)}", str(n), fragmented(market, n), inputs) for n in DOMAINS
        ]
    names = [name for name, *_ in markets]
    markets = [market for market in markets if fnmatchcase(market[0], only)]
    if not markets:
        raise ScenarioError(f"no case matches {only!r}; there are {', '.join(names)}")
    return [
        Case(
            name,
            group,
            engine,
            replace(data, templates=runnable(data.templates, engine)),
            None if whole is None else runnable(whole, engine),
            inputs,
        )
        for engine in engines
        for name, group, data, inputs in markets
    ]


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


def plan_cases(
    cases: Sequence[Case], *, ablate: bool = False, simulate_minutes: float = 0.0
) -> list[Line]:
    """Every case planned by Coral and by the baselines, or with levers off, and simulated.

    Coral goes last: it starts from the best plan of the others that it could have made too, those
    with fewer templates included, and so is never worse than any of them.
    """
    lines: list[Line] = []
    best: dict[str, Plan] = {}  # Coral's so far, by case
    done, total = 0, sum(1 + len(_others(case, ablate)) for case in cases)
    for case in cases:
        found: dict[str, Plan | Orders | None] = {}
        for name, planner in _others(case, ablate).items():
            progress.report("compare", done, total)
            found[name] = _try(planner, case.data)
            done += 1
        progress.report("compare", done, total)
        starts = [plan for plans in found.values() for plan in _plans(plans)]
        starts += [best[case.name]] if case.name in best else []
        best[case.name] = _coral(case.data, starts)
        done += 1
        found = {CORAL: best[case.name], **found}
        lines += [
            served_in_simulation(case.inputs, _line(case, name, plans), _plans(plans),
                                 simulate_minutes)
            for name, plans in found.items()
        ]  # fmt: skip
    progress.report("compare", total, total)
    order = list(Engine)
    return sorted(lines, key=lambda line: order.index(line.engine))


def compare(
    catalog: Catalog,
    spec: ScenarioSpec,
    *,
    engines: Sequence[Engine] = (Engine.VLLM, Engine.ANY),
    suite: bool = False,
    sweep: str | None = None,
    only: str = "*",
    ablate: bool = False,
    deadline_s: float = 10.0,
    simulate_minutes: float = 2.0,
) -> Comparison:
    """Plan every case with Coral and each baseline (or each lever off) and write table and plot.

    Every plan then serves `simulate_minutes` of requests in simulation (0: not).
    """
    cases = cases_of(
        catalog, spec, engines, suite=suite, sweep=sweep, only=only, ablate=ablate,
        deadline_s=deadline_s,
    )  # fmt: skip
    lines = plan_cases(cases, ablate=ablate, simulate_minutes=simulate_minutes)
    kind = "ablation" if ablate else "comparison"
    over = "the suite" if suite else f"{sweep} of {spec.name}" if sweep else spec.name
    title = f"{kind} over {over}"
    folder = catalog.home / "reports"
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{kind}-{spec.name}-{uuid.uuid4().hex[:8]}"
    table, plot = folder / f"{stem}.csv", folder / f"{stem}.png"
    pl.DataFrame(lines).write_csv(table)
    draw_lines(lines, title, plot)
    return Comparison(title, ablate, tuple(lines), table, plot)


compare_task = coral_task("compare", compare)


def _others(case: Case, ablate: bool) -> Mapping[str, Planner]:
    return dict(levers(case.data, case.whole)) if ablate else baselines()


def baselines() -> dict[str, Planner]:
    """Names and planners of one case; a looser Homo-joint may keep a stricter one's plan."""
    strict: list[Plan] = []

    def joint(max_nodes: int | None) -> Planner:
        def plan(data: AllocationInput) -> Plan:
            strict.append(plan_homo_joint(data, max_nodes, strict[-1] if strict else None))
            return strict[-1]

        return plan

    return {
        "single": plan_single,
        "cauchy": plan_cauchy,
        "homo, 1 node": lambda data: plan_homo(data, max_nodes=1),
        "homo": plan_homo,
        "homo-joint, 1 node": joint(1),
        "homo-joint, 2 nodes": joint(2),
        "homo-joint": joint(None),
    }


def _coral(data: AllocationInput, starts: Sequence[Plan]) -> Plan:
    """Coral's plan; without least served shares where no plan keeps them."""
    try:
        return plan_from(data, starts)
    except LeastServedError:
        return plan_from(data.without_promises(), starts)


def _try(planner: Planner, data: AllocationInput) -> Plan | Orders | None:
    """None where the planner fails: the others are compared all the same."""
    try:
        return planner(data)
    except CoralError:
        return None


def _plans(found: Plan | Orders | None) -> tuple[Plan, ...]:
    if found is None:
        return ()
    return found.plans if isinstance(found, Orders) else (found,)


def _line(case: Case, planner: str, found: Plan | Orders | None) -> Line:
    if found is None:
        return Line(case.engine, case.name, case.group, planner, 0.0, 0.0, 0.0, 0, None, 0.0)
    plans = _plans(found)
    tokens = {w.name: w.lengths.mean_input + w.lengths.mean_output for w in case.data.workloads}
    number = len(plans)
    return Line(
        engine=case.engine,
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

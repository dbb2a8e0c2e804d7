"""Published systems: their answers are reached, and what they lack is named."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from bench.peer_data import DATA, helix_case, helix_cases, melange_cases
from bench.peers import compare_helix, compare_melange
from planner.baselines.helix import plan_pipeline, plan_replicas
from planner.baselines.helix_flow import SINK, SOURCE, NodeLayers, max_flow, nodes_of
from planner.baselines.helix_regions import Regions, best_regional_pipeline
from planner.baselines.melange import GpuType, MelangeCase, plan_coral, plan_melange
from planner.errors import CoralError, InputError, MissingProfileError, NoTemplateError
from planner.placement.rate_library import rate_library
from planner.placement.rate_pipeline import TOLERANCE, best_pipeline, pipeline_at
from planner.placement.rates import RateTable
from planner.types import Combination, combination_of

WIDE = 1e9  # tokens/s of a link that never binds

# --- Melange ---


@pytest.mark.parametrize("published", list(melange_cases()), ids=lambda p: p.name)
def test_melange_answers_are_reached_and_coral_costs_no_more(published) -> None:
    row = compare_melange(published)
    assert row["proven"]
    assert row["melange_usd_per_hour"] == pytest.approx(published.cost_usd_per_hour)
    assert row["coral_usd_per_hour"] <= published.cost_usd_per_hour + 1e-6
    assert row["coral_usd_per_hour"] == pytest.approx(published.shared_usd_per_hour)


def random_melange(seed: int) -> MelangeCase:
    rng = np.random.default_rng(seed)
    buckets = ("short", "middle", "long")
    gpus = {"big": GpuType(4.0, tuple(rng.uniform(2.0, 6.0, 3).tolist()))}
    for name in ("small", "tiny"):
        rates = rng.uniform(0.3, 2.0, 3) * (rng.random(3) < 0.7)  # some cannot serve at all
        gpus[name] = GpuType(float(rng.uniform(0.5, 1.5)), tuple(rates.tolist()))
    demand = rng.uniform(0.0, 3.0, 3) * (rng.random(3) < 0.8)
    demand[0] += 0.5
    return MelangeCase.of(buckets, tuple(demand.tolist()), gpus, slices=2)


@pytest.mark.parametrize("seed", range(12))
def test_melange_matches_trying_every_assignment(seed: int) -> None:
    case = random_melange(seed)
    best = np.inf
    slices = [b for b, demand in enumerate(case.demand_rps) if demand > 0 for _ in range(2)]
    for types in product(case.gpus, repeat=len(slices)):
        load = dict.fromkeys(case.gpus, 0.0)
        for bucket, name in zip(slices, types, strict=True):
            rate = case.gpus[name].serves_rps[bucket]
            load[name] += case.demand_rps[bucket] / 2 / rate if rate > 0 else np.inf
        if np.isfinite(list(load.values())).all():
            cost = sum(gpu.price_usd_per_hour * np.ceil(load[name] - 1e-9)
                       for name, gpu in case.gpus.items())  # fmt: skip
            best = min(best, cost)
    theirs = plan_melange(case)
    assert theirs.proven
    assert theirs.cost_usd_per_hour == pytest.approx(best)
    mine = plan_coral(case)
    assert mine.proven
    assert mine.cost_usd_per_hour <= best + 1e-6


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"gpus": {"A": GpuType(1.0, (1.0,))}}, MissingProfileError, "1 throughputs for 2 buckets"),
        ({"gpus": {"A": GpuType(1.0, (1.0, 0.0))}}, NoTemplateError, "bucket b has demand"),
        ({"gpus": {"A": GpuType(0.0, (1.0, 1.0))}}, InputError, "price"),
        ({"demand_rps": (0.0, 0.0)}, InputError, "no bucket has demand"),
        ({"slices": 0}, InputError, "slice"),
    ],
)
def test_melange_bad_input_is_named(change, error, words: str) -> None:
    good = {"buckets": ("a", "b"), "demand_rps": (1.0, 1.0), "slices": 1,
            "gpus": {"A": GpuType(1.0, (1.0, 1.0))}}  # fmt: skip
    with pytest.raises(error, match=words) as caught:
        MelangeCase.of(**(good | change))
    assert isinstance(caught.value, CoralError)


# --- throughput tables ---


def random_table(seed: int, layers: int = 5) -> RateTable:
    """Three machine types whose rates need not fall with the layers, as Helix's do not."""
    rng = np.random.default_rng(seed)
    rows = {}
    for name in ("A", "B", "C"):
        held = int(rng.integers(2, 5))
        rates = rng.uniform(50, 200) / np.arange(1, held + 1) * rng.uniform(0.7, 1.4, held)
        rows[name] = {n + 1: float(rate) for n, rate in enumerate(rates)}
    return RateTable.of("model", layers, rows)


def pipelines(table: RateTable, machines: list[str]) -> Iterator[list[tuple[list[int], int]]]:
    """Every pipeline on numbered machines, stages in every order: (machines, layers)."""
    for stages in range(1, min(len(machines), table.layers) + 1):
        for place in product(range(stages + 1), repeat=len(machines)):
            groups = [[m for m, s in enumerate(place) if s == k] for k in range(stages)]
            if not all(groups):
                continue
            for cuts in combinations(range(1, table.layers), stages - 1):
                ends = [0, *cuts, table.layers]
                held = [b - a for a, b in pairwise(ends)]
                if all(
                    layers <= len(table.tokens_per_s[machines[m]])
                    for group, layers in zip(groups, held, strict=True)
                    for m in group
                ):
                    yield list(zip(groups, held, strict=True))


def least_stage(table: RateTable, machines: list[str], pipeline) -> float:
    return min(
        sum(table.tokens_per_s[machines[m]][layers - 1] for m in group)
        for group, layers in pipeline
    )


CLUSTERS: tuple[Combination, ...] = ((("A", 2), ("B", 2)), (("A", 1), ("B", 1), ("C", 2)))


@pytest.mark.parametrize("seed", range(12))
def test_pipeline_and_library_match_trying_everything(seed: int) -> None:
    table = random_table(seed)
    cluster = CLUSTERS[seed % len(CLUSTERS)]
    library = rate_library(table, cluster, 4)
    best: dict[tuple[int, ...], float] = {}  # of one pipeline
    most: dict[tuple[int, ...], float] = {}  # of pipelines on disjoint machines
    for row, found in enumerate(library.counts.tolist()):
        counts = tuple(found)
        machines = [n for (n, _), c in zip(cluster, counts, strict=True) for _ in range(c)]
        rates = (least_stage(table, machines, p) for p in pipelines(table, machines))
        best[counts] = max(rates, default=0.0)
        floor = 0.0
        for part in list(most):
            if all(a <= b for a, b in zip(part, counts, strict=True)):
                rest = tuple(b - a for a, b in zip(part, counts, strict=True))
                floor = max(floor, most[part] + most.get(rest, 0.0))
        most[counts] = max(best[counts], floor)
        assert library.tokens_per_s[row] == pytest.approx(best[counts])
        assert library.floor_tokens_per_s[row] == pytest.approx(floor)
    whole = best[tuple(count for _, count in cluster)]
    if whole == 0.0:
        with pytest.raises(NoTemplateError):
            best_pipeline(table, cluster)
        return
    found = best_pipeline(table, cluster)
    assert found.tokens_per_s == pytest.approx(whole)
    assert found.bound_tokens_per_s <= whole * (1 + 2 * TOLERANCE)
    assert whole <= table.work_bound(cluster) + 1e-9
    above, settled = pipeline_at(table, cluster, whole * 1.001)
    assert above is None
    assert settled


@pytest.mark.parametrize("seed", range(6))
def test_pipeline_over_regions_matches_trying_everything(seed: int) -> None:
    table = random_table(seed, layers=4)
    names = ["A", "B", "C", "A", "B"]
    regions = ["x", "y", "y", "x", "x"] if seed % 2 else ["x", "y", "z", "x", "y"]
    rng = np.random.default_rng(seed)
    slow = {pair: float(rng.uniform(5, 60)) for pair in combinations("xyz", 2)}

    def link(one: str, other: str) -> float:
        if one == SOURCE or other == SINK:
            return WIDE
        a, b = regions[int(one)], regions[int(other)]
        return WIDE if a == b else slow[min(a, b), max(a, b)]

    best = 0.0
    for pipeline in pipelines(table, names):
        places = [{regions[m] for m in group} for group, _ in pipeline]
        path = [min(p) for p in places]
        passes = [r for n, r in enumerate(path) if n == 0 or path[n - 1] != r]
        single = any(path.count(r) == 1 for r in passes[1:-1])
        if any(len(p) > 1 for p in places) or len(set(passes)) < len(passes) or single:
            continue
        if least_stage(table, names, pipeline) > best:
            best = max(best, flow_of(table, names, pipeline, link))
    machines = {
        region: combination_of({n: sum(a == n and b == region for a, b in
                                       zip(names, regions, strict=True)) for n in "ABC"})
        for region in sorted(set(regions))
    }  # fmt: skip
    assert best > 0
    links = slow | {(b, a): rate for (a, b), rate in slow.items()}
    found = best_regional_pipeline(table, Regions(machines, links))
    assert found.tokens_per_s == pytest.approx(best, rel=1e-5)


def flow_of(table: RateTable, names: list[str], pipeline, link) -> float:
    nodes, first = [], 0
    for group, layers in pipeline:
        for m in group:
            rate = table.tokens_per_s[names[m]][layers - 1]
            nodes.append(NodeLayers(str(m), first, first + layers, rate))
        first += layers
    return max_flow(nodes, table.layers, link)


# --- Helix ---


def test_helix_flows_of_saved_layouts_are_those_of_its_own_program() -> None:
    seen = 0
    for published in helix_cases():
        for saved in published.saved:
            layout = published.layouts.get(saved.method)
            if layout is not None and saved.flow_tokens_per_s is not None:
                flow = max_flow(layout, published.table.layers, published.link)
                assert flow == pytest.approx(saved.flow_tokens_per_s, rel=1e-6)
                assert flow == pytest.approx(saved.objective_tokens_per_s, rel=1e-6)
                seen += 1
    assert seen >= 10


@pytest.mark.parametrize(
    ("cluster", "model", "optimum"),
    [("cluster10", "llama1-30b", 286.587), ("cluster24", "llama2-70b", 2045.64)],
)
def test_helix_proven_optima_are_found(cluster: str, model: str, optimum: float) -> None:
    """The optima that bench/data/helix/README.md states."""
    published = next(c for c in helix_cases() if (c.cluster, c.model) == (cluster, model))
    row = compare_helix(published, replica_machines=8)
    assert row["coral_tokens_per_s"] == pytest.approx(optimum, abs=5e-3)
    assert row["placement_bound"] == pytest.approx(optimum, abs=1e-2)
    assert row["replicas_tokens_per_s"] == pytest.approx(optimum, abs=5e-3)
    assert not row["links_bind"]
    assert row["stages"] == row["machines"]


def test_no_small_template_of_helix_cluster_holds_the_70b_model() -> None:
    published = helix_case("cluster24", "llama2-70b")
    assert not list(rate_library(published.table, published.machines, 8).kept())
    assert list(rate_library(published.table, published.machines, 9).kept())


def test_links_of_clusters_with_one_region_carry_what_any_machine_serves() -> None:
    for cluster, model in (("cluster10", "llama1-30b"), ("cluster24", "llama2-70b"),
                           ("cluster42", "llama2-70b")):  # fmt: skip
        published = helix_case(cluster, model)
        fastest = max(max(rates) for rates in published.table.tokens_per_s.values())
        assert fastest < min(published.inner_link, published.outer_link)


@pytest.mark.parametrize("seed", range(6))
def test_replicas_of_the_allocation_are_the_best_there_are(seed: int) -> None:
    table = random_table(seed, layers=4)
    cluster = (("A", 3), ("B", 3), ("C", 2))
    library = rate_library(table, cluster, 8)
    best = max(library.tokens_per_s[-1], library.floor_tokens_per_s[-1])
    replicas = plan_replicas(table, cluster, 8)
    assert replicas.tokens_per_s == pytest.approx(best, rel=1e-4)
    ids = {name: [f"{name}{n}" for n in range(count)] for name, count in cluster}
    nodes = nodes_of(table, replicas.pipelines, {"": ids})
    flow = max_flow(nodes, table.layers, lambda one, other: WIDE)
    assert replicas.tokens_per_s - 1e-6 <= flow <= table.work_bound(cluster) + 1e-6


def test_several_replicas_may_serve_more_than_one_pipeline() -> None:
    published = helix_case("cluster24", "llama1-30b")
    whole = plan_pipeline(published.table, published.machines)
    library = rate_library(published.table, published.machines, 24)
    assert library.tokens_per_s[-1] == pytest.approx(whole.tokens_per_s)
    assert library.floor_tokens_per_s[-1] > whole.tokens_per_s


def test_helix_bad_input_is_named() -> None:
    published = helix_case("cluster24", "llama2-70b")
    table = published.table
    with pytest.raises(NoTemplateError, match=r"4 A100 may hold 48 of 80 layers; add machines"):
        plan_pipeline(table, (("A100", 4),))
    with pytest.raises(MissingProfileError, match="no throughput table of machine 'V100'"):
        plan_pipeline(table, (("A100", 4), ("V100", 40)))
    with pytest.raises(MissingProfileError, match="the table of A100 lacks 2 layers"):
        RateTable.of("m", 4, {"A100": {1: 10.0, 3: 2.0}})
    with pytest.raises(MissingProfileError, match="the table of A100 lacks 1 layers"):
        RateTable.of("m", 4, {"A100": {}})
    with pytest.raises(InputError, match="not a positive number"):
        RateTable.of("m", 4, {"A100": {1: float("nan")}})
    with pytest.raises(InputError, match="allow fewer machines"):
        rate_library(table, (("A100", 40), ("L4", 40), ("T4", 40)), 120)
    with pytest.raises(NoTemplateError, match="no pipeline over these regions"):
        best_regional_pipeline(
            RateTable.of("m", 2, {"A": {1: 5.0}}),
            Regions({"x": (("A", 1),), "y": (("A", 1),)}, {("x", "y"): 0.0, ("y", "x"): 0.0}),
        )
    with pytest.raises(InputError, match="layers that the model has"):
        max_flow([NodeLayers("0", 0, 9, 1.0)], 8, published.link)


def test_published_inputs_are_described() -> None:
    for folder in ("melange", "helix"):
        text = (DATA / folder / "README.md").read_text()
        for file in (DATA / folder).iterdir():
            assert file.name == "README.md" or file.name in text
        assert "commit" in text
        assert "icence" in text or "Apache-2.0" in text

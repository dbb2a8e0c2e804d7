"""Inputs and saved results of the systems that Coral is compared with: `bench/data`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.baselines.helix_flow import SINK, SOURCE, NodeLayers
from planner.baselines.helix_regions import Regions
from planner.baselines.melange import GpuType, MelangeCase
from planner.placement.rates import RateTable
from planner.types import Combination, combination_of

DATA = Path(__file__).parent / "data"
MODELS = {"llama2-70b": (80, 16384.0), "llama1-30b": (60, 13312.0)}  # layers, activation bytes
TOKEN_BYTES = 2.0
LINK_BYTES_PER_S = 1e9  # helix_region_links.csv: every link of the clusters with one region


@dataclass(frozen=True)
class PublishedMelange:
    """One case of Melange's and what it answered."""

    name: str
    case: MelangeCase
    cost_usd_per_hour: float  # of its repository's own solver
    shared_usd_per_hour: float  # least cost where buckets may share replicas in any proportion


def melange_cases() -> Iterator[PublishedMelange]:
    """Every case of `bench/data/melange`."""
    folder = DATA / "melange"
    results = json.loads((folder / "results.json").read_text())
    for name, payload in json.loads((folder / "cases.json").read_text()).items():
        found = results[name]
        yield PublishedMelange(
            name,
            melange_case(payload),
            float(found["melange"]["cost_per_hour"]),
            float(found["reference_same_input"]["fractional_assignment"]["cost"]),
        )


def melange_case(payload: Any) -> MelangeCase:
    """A case in Melange's own JSON: buckets are the cells of a grid (input row, output column)."""
    shares = payload["workload_distribution"]
    cells = [(i, j) for i, row in enumerate(shares) for j in range(len(row))]
    return MelangeCase.of(
        tuple(f"in{i}_out{j}" for i, j in cells),
        tuple(float(shares[i][j] * payload["total_request_rate"]) for i, j in cells),
        {
            name: GpuType(
                float(gpu["cost"]), tuple(float(rps) for row in gpu["tputs"] for rps in row)
            )
            for name, gpu in payload["gpu_info"].items()
        },
        int(payload["slice_factor"]),
    )


@dataclass(frozen=True)
class PublishedHelix:
    """One cluster and model of Helix's: machines, throughputs, links and its saved plans."""

    cluster: str
    model: str
    table: RateTable
    nodes: Mapping[str, Mapping[str, tuple[str, ...]]]  # node numbers by region, machine type
    links: Mapping[tuple[str, str], float]  # tokens/s; of the pairs that have a link of their own
    inner_link: float  # tokens/s between any other two nodes
    outer_link: float  # and between one and the coordinator
    layouts: Mapping[str, tuple[NodeLayers, ...]]  # by method
    saved: tuple[SavedPlan, ...]

    @property
    def pooled(self) -> Mapping[str, tuple[str, ...]]:
        """Node numbers by machine type."""
        found: dict[str, tuple[str, ...]] = {}
        for of_region in self.nodes.values():
            for machine, ids in of_region.items():
                found[machine] = found.get(machine, ()) + ids
        return found

    @property
    def machines(self) -> Combination:
        return combination_of({machine: len(ids) for machine, ids in self.pooled.items()})

    @property
    def regions(self) -> Regions:
        """Machines by region, with the slowest link between two."""
        region_of = {
            node: region
            for region, of_region in self.nodes.items()
            for ids in of_region.values()
            for node in ids
        }
        slowest: dict[tuple[str, str], float] = {}
        for (start, end), rate in self.links.items():
            if start in region_of and end in region_of and region_of[start] != region_of[end]:
                pair = (region_of[start], region_of[end])
                slowest[pair] = min(slowest.get(pair, rate), rate)
        machines = {
            region: combination_of({machine: len(ids) for machine, ids in of_region.items()})
            for region, of_region in self.nodes.items()
        }
        return Regions(machines, slowest)

    def link(self, start: str, end: str) -> float:
        """Tokens/s of one link."""
        outer = start == SOURCE or end == SINK
        return self.links.get((start, end), self.outer_link if outer else self.inner_link)


@dataclass(frozen=True)
class SavedPlan:
    """What Helix's planner left: objective, Gurobi's bound, seconds and how it ended."""

    method: str
    objective_tokens_per_s: float
    bound_tokens_per_s: float | None
    solver_s: float | None
    status: str
    flow_tokens_per_s: float | None  # of its layout, as recomputed when the data was collected


def helix_cases() -> Iterator[PublishedHelix]:
    """Every (cluster, model) that Helix's planner has results of, sub-clusters after theirs."""
    plans: dict[tuple[str, str], list[SavedPlan]] = {}
    for row in _rows("helix_results"):
        if row["kind"] == "planner" and row["objective_tokens_per_s"]:
            part = f"-{row['sub_cluster']}" if row["sub_cluster"] else ""
            plans.setdefault((row["cluster"] + part, row["model"]), []).append(
                SavedPlan(
                    row["method"] + part.replace("-", "_"),
                    float(row["objective_tokens_per_s"]),
                    _number(row["bound_tokens_per_s"]),
                    _number(row["solver_s"]),
                    row["solver_status"],
                    _number(row["max_flow_recomputed_tokens_per_s"]),
                )
            )
    for (cluster, model), saved in sorted(plans.items()):
        yield helix_case(cluster, model, tuple(saved))


def helix_case(cluster: str, model: str, saved: tuple[SavedPlan, ...] = ()) -> PublishedHelix:
    """A cluster ('cluster24') or the machines of one type in it ('cluster24-t4') with a model."""
    whole, _, part = cluster.partition("-")
    nodes: dict[str, dict[str, tuple[str, ...]]] = {}
    for row in _rows("helix_clusters"):
        if row["cluster"] == whole and part in {"", row["machine"].lower()}:
            ids = tuple(row["node_ids"].split(";"))
            nodes.setdefault(row["region"], {})[row["machine"]] = ids
    layers, activation_bytes = MODELS[model]
    tables = cluster.replace("3cluster24", "cluster24")
    rates: dict[str, dict[int, float]] = {}
    for row in _rows("helix_throughput"):
        if (row["cluster"], row["model"]) == (tables, model):
            rates.setdefault(row["machine"], {})[int(row["num_layers"])] = float(
                row["tokens_per_s"]
            )
    table = RateTable.of(model, layers, rates)
    links = {
        (row["from_node"], row["to_node"]): float(row["bandwidth_bytes_per_s"])
        / (TOKEN_BYTES if {row["from_node"], row["to_node"]} & {SOURCE, SINK} else activation_bytes)
        for row in _rows("helix_links_3cluster24")
        if row["cluster"] == whole
    }
    links |= {(b, a): rate for (a, b), rate in links.items() if {a, b}.isdisjoint({SOURCE, SINK})}
    layouts: dict[str, list[NodeLayers]] = {}
    for row in _rows("helix_layouts"):
        if (row["cluster"], row["model"]) == (whole, model) and row["start_layer"]:
            held = int(row["num_layers"])
            if held <= len(table.tokens_per_s.get(row["machine"], ())):
                layouts.setdefault(row["method"], []).append(
                    NodeLayers(
                        row["node_id"],
                        int(row["start_layer"]),
                        int(row["end_layer"]),
                        table.tokens_per_s[row["machine"]][held - 1],
                    )
                )
    return PublishedHelix(
        cluster,
        model,
        table,
        nodes,
        links,
        LINK_BYTES_PER_S / activation_bytes,
        LINK_BYTES_PER_S / TOKEN_BYTES,
        {method: tuple(found) for method, found in layouts.items()},
        saved,
    )


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (DATA / "helix" / f"{name}.csv").open(newline="") as file:
        yield from csv.DictReader(file)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # empty, or 'about 600 (readme)'
        return None

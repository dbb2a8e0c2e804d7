"""Coral beside two published systems, on their own inputs and under their own assumptions.

    python -m bench.peers --json

Melange: its program solved again to its optimum, Coral's allocation of the same, and the cost that
Melange's repository answered; `ratio` is Melange's cost over Coral's.
Helix: the pipeline that Coral's placement finds over Helix's throughput tables on the whole
cluster, measured as Helix measures its own (maximum flow, links included), beside the best of the
objectives that Helix saved; `ratio` is Coral's over Helix's, `helix_s` Gurobi's seconds on the
authors' machine. `placement_bound` is what no pipeline of Coral's kind exceeds, `bound` what no
placement of Helix's exceeds (the lower of Gurobi's bound and of all machines' work). `replicas`:
whole replicas of Coral's, of at most `replica_machines` each or the whole cluster, chosen by its
allocation. Where links between regions bind, the pipeline is the one over regions.
"""

from __future__ import annotations

import argparse
import json
import time

from rich.console import Console
from rich.table import Table

from bench.peer_data import PublishedHelix, PublishedMelange, helix_cases, melange_cases
from planner.baselines.helix import plan_pipeline, plan_replicas
from planner.baselines.helix_flow import max_flow, nodes_of
from planner.baselines.helix_regions import best_regional_pipeline
from planner.baselines.melange import plan_coral, plan_melange
from planner.placement.rates import RatePipeline

FEW_MACHINES = 24  # of a cluster: replicas of any size are solved
HIDDEN = {"pipeline", "helix_bounds", "replica_machines", "placement_bound", "machines"}
BINDS = 1e-6  # relative: links that take more than that from a pipeline

Row = dict[str, object]


def compare_melange(published: PublishedMelange) -> Row:
    """Costs in USD/hour."""
    theirs, mine = plan_melange(published.case), plan_coral(published.case)
    return {
        "case": published.name,
        "coral_usd_per_hour": round(mine.cost_usd_per_hour, 6),
        "melange_usd_per_hour": round(theirs.cost_usd_per_hour, 6),
        "published_usd_per_hour": published.cost_usd_per_hour,
        "ratio": round(theirs.cost_usd_per_hour / mine.cost_usd_per_hour, 4),
        "proven": mine.proven and theirs.proven,
        "coral_s": round(mine.solve_s, 3),
        "melange_s": round(theirs.solve_s, 3),
    }


def compare_helix(published: PublishedHelix, replica_machines: int) -> Row:
    """Throughputs in tokens/s, prompt and generated."""
    table, machines, layers = published.table, published.machines, published.table.layers
    started = time.perf_counter()
    pipeline = plan_pipeline(table, machines)
    nodes = nodes_of(table, [pipeline], {"": published.pooled})
    served = max_flow(nodes, layers, published.link)
    bind = served < pipeline.tokens_per_s * (1.0 - BINDS)
    if bind and len(published.nodes) > 1:
        pipeline = best_regional_pipeline(table, published.regions)
        served = max_flow(nodes_of(table, [pipeline], published.nodes), layers, published.link)
    coral_s = time.perf_counter() - started
    best = max(
        published.saved, key=lambda s: (round(s.objective_tokens_per_s, 3), s.solver_s is not None)
    )
    bounds = [s.bound_tokens_per_s for s in published.saved if s.bound_tokens_per_s is not None]
    row: Row = {
        "cluster": published.cluster,
        "model": published.model,
        "machines": pipeline.machines,
        "stages": len(pipeline.stages),
        "coral_tokens_per_s": round(served, 3),
        "helix_tokens_per_s": round(best.objective_tokens_per_s, 3),
        "ratio": round(served / best.objective_tokens_per_s, 4),
        "placement_bound": round(pipeline.bound_tokens_per_s, 3),
        "bound": round(min([table.work_bound(machines), *bounds]), 3),
        "helix_bounds": {s.method: s.bound_tokens_per_s for s in published.saved},
        "helix_optimal": any(s.status == "optimal" for s in published.saved),
        "links_bind": bind,
        "coral_s": round(coral_s, 3),
        "helix_s": best.solver_s,
        "pipeline": pipeline.describe(),
    }
    return row | _replicas(published, pipeline, replica_machines, bind)


def _replicas(
    published: PublishedHelix, pipeline: RatePipeline, replica_machines: int, bind: bool
) -> Row:
    """Nothing where links bind: the allocation knows none inside a replica."""
    if bind:
        return dict.fromkeys(("replicas", "replicas_tokens_per_s", "replica_machines"))
    total = sum(count for _, count in published.machines)
    most = total if total <= FEW_MACHINES else replica_machines
    replicas = plan_replicas(published.table, published.machines, most, pipeline)
    return {
        "replicas": len(replicas.pipelines),
        "replicas_tokens_per_s": round(replicas.tokens_per_s, 3),
        "replica_machines": most,
    }


def main() -> None:
    """Parse, plan, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--replica-machines", type=int, default=8, help=f"above {FEW_MACHINES} machines"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    melange = [compare_melange(published) for published in melange_cases()]
    helix = [compare_helix(published, options.replica_machines) for published in helix_cases()]
    console = Console(stderr=options.json, width=180)
    for title, rows in (("Melange", melange), ("Helix", helix)):
        console.print(_table(title, rows))
    if options.json:
        print(json.dumps({"melange": melange, "helix": helix}))


def _table(title: str, rows: list[Row]) -> Table:
    names = [n for n in rows[0] if n not in HIDDEN]
    table = Table(*names, title=title)
    for row in rows:
        table.add_row(
            *(f"{v:.6g}" if isinstance(v, float) else str(v) for v in map(row.get, names))
        )
    return table


if __name__ == "__main__":
    main()

"""Workloads and templates of systems that publish throughputs and nothing else.

The allocation looks at demand, combination and throughput; what else a workload and a template
have is filled with ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.types import (
    Combination,
    Lengths,
    ModelSpec,
    Phase,
    Placement,
    Provenance,
    Slo,
    Stage,
    StageNode,
    Template,
    Workload,
)

_MODEL = ModelSpec("published", "fp16", 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 2.0, 0.0, 1, 0, 0, 1, 1)
_LENGTHS = Lengths("published", 1.0, 1.0, 1.0, 1.0)
_SLO = Slo(1.0, 1.0)


def plain_workload(name: str, demand_rps: float) -> Workload:
    """A demand in requests/s."""
    return Workload(name, _MODEL, _MODEL.dtype, _SLO, _LENGTHS, demand_rps)


def plain_template(
    name: str, combination: Combination, serves_rps: Mapping[str, float]
) -> Template:
    """An aggregated template with its requests/s of every workload."""
    first, *others = serves_rps
    nodes = tuple(StageNode(n, 1, 1, 1) for n, count in combination for _ in range(count))
    return Template(
        id=name,
        workload=first,
        phase=Phase.AGGREGATED,
        combination=combination,
        placement=Placement((Stage(0, 1, nodes),), 1, 1, 1.0, 1.0, serves_rps[first]),
        throughput_rps=serves_rps[first],
        provenance=Provenance.MEASURED,
        shared_rps={other: serves_rps[other] for other in others},
    )

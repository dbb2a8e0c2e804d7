"""Questions that the command line answers from the snapshot."""

from __future__ import annotations

from planner.errors import UnknownNameError
from planner.types import Phase
from tasks.home import open_catalog

SORTS = ("tokens_per_usd", "throughput_rps", "usd_per_hour", "nodes")


def show_library(
    home: str | None,
    workload: str | None,
    phase: str | None,
    gpu: str | None,
    nodes: int | None,
    sort: str,
    limit: int,
) -> tuple[list[str], list[tuple[object, ...]]]:
    """Templates that match, as columns and rows.

    Raises UnknownNameError: a workload, phase, GPU or sort key that is not there.
    """
    catalog = open_catalog(home)
    if sort not in SORTS:
        raise UnknownNameError("sort key", sort, SORTS)
    if phase is not None and phase not in list(Phase):
        raise UnknownNameError("phase", phase, list(Phase))
    for kind, name, known in (
        ("workload", workload, "SELECT DISTINCT workload FROM template"),
        ("GPU", gpu, "SELECT gpu FROM gpu"),
    ):
        names = [str(row[0]) for row in catalog.query(known)[1]] if name is not None else []
        if name is not None and name not in names:
            raise UnknownNameError(kind, name, names)
    order = "ASC" if sort in {"usd_per_hour", "nodes"} else "DESC"
    return catalog.query(
        "SELECT workload, phase, placement, nodes, throughput_rps, usd_per_hour, tokens_per_usd, "
        "ttft_ms, tpot_ms, provenance FROM best_templates "
        "WHERE ($1 IS NULL OR workload = $1) AND ($2 IS NULL OR phase = $2) "
        "AND ($3 IS NULL OR template_id IN "
        "(SELECT template_id FROM template_stage WHERE node_class LIKE $3 || ' x%')) "
        f"AND ($4 IS NULL OR nodes = $4) ORDER BY {sort} {order}, template_id LIMIT $5",
        [workload, phase, gpu, nodes, limit],
    )

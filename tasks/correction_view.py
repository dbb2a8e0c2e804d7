"""What serving taught, from the snapshot."""

from __future__ import annotations

from planner.errors import InputError
from tasks.home import open_catalog


class UnknownCorrectionError(InputError):
    """No template of that id was corrected."""


def show_corrections(
    home: str | None, evidence: str | None, limit: int
) -> tuple[list[str], list[tuple[object, ...]]]:
    """The corrections in force, or the minutes behind those of one template (the newest first).

    Raises UnknownCorrectionError: no template whose id begins so was ever corrected.
    """
    catalog = open_catalog(home)
    if evidence is None:
        return catalog.query(
            "SELECT scenario, workload, phase, template_id, round(factor, 3) AS factor, "
            "round(speed, 3) AS speed, kind, round(observed, 3) AS observed, "
            "round(predicted, 3) AS predicted, round(among, 2) AS among, minutes, replicas, "
            "last_minute, profile_row FROM correction_now "
            "WHERE factor <> 1 AND last_minute >= now() - INTERVAL 24 HOURS "
            "ORDER BY ALL LIMIT ?",
            [limit],
        )
    columns, rows = catalog.query(
        "SELECT * FROM correction_evidence WHERE starts_with(template_id, ?) "
        "ORDER BY corrected_at DESC, minute DESC, replica LIMIT ?",
        [evidence, limit],
    )
    if not rows:
        raise UnknownCorrectionError(
            f"no correction of a template {evidence!r}; `coral corrections` and `coral sql "
            '"FROM correction"` show those that were'
        )
    return columns, rows

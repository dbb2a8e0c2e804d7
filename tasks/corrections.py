"""What serving taught: corrections of templates, profiles that were wrong, lengths that moved.

Source: docs/formulation.md, section 12.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import numpy as np
import polars as pl

from catalog import reads
from catalog.corrections import (
    CorrectionRow,
    read_corrections,
    read_minutes,
    write_corrections,
)
from catalog.observed import SeenLengths, read_lengths_seen
from catalog.store import Catalog
from planner.corrections import DRIFT, Minutes, Speed, factor_of, settled, speed_of
from planner.errors import MissingProfileError
from planner.expected import Bench
from planner.types import Template, Workload
from tasks.inputs import CORRECTED, Inputs

COMPLETE = timedelta(minutes=2)  # until all gateways' files of a minute are there
AGAIN = timedelta(hours=1)  # after which a correction in force is written again
NO_EVIDENCE = "none"  # the kind of a correction that is over
LEAST_REQUESTS = 200  # whose lengths are known, before anything is said of them
LENGTHS_OFF = 0.25


@dataclass(frozen=True)
class Learned:
    """What the last day taught."""

    factors: Mapping[str, float] = field(default_factory=dict)  # in force now, by template
    changed: tuple[str, ...] = ()  # corrections that came, moved or went, in words
    drifts: tuple[str, ...] = ()  # profiles that are off by more than 15%, with their row
    lengths: tuple[str, ...] = ()  # models whose requests are not as long as was planned

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan's report says of it."""
        return tuple(f"{line}." for line in (*self.drifts, *self.lengths))


def learn(catalog: Catalog, inputs: Inputs, now: datetime, *, record: bool = True) -> Learned:
    """Compare the last day's minutes with the templates and lengths that they were planned with.

    Corrections that come, move or go are recorded, unless `record` says not to.
    """
    with catalog.read() as connection:
        lengths = _length_notes(inputs, read_lengths_seen(connection, now - CORRECTED))
        if inputs.scenario.placement.corrections == "none":
            return Learned(lengths=lengths)
        frame = read_minutes(connection, now - CORRECTED, now - COMPLETE)
        stored = read_corrections(connection, inputs.scenario.name)
        names = sorted({*frame["template"], *stored})
        templates = {t.id: t for t in reads.read_templates(connection, names)}
    found = {}
    for name in names:
        minutes = frame.filter(pl.col("template") == name)
        row = _judged(inputs, templates.get(name), minutes, stored.get(name), now)
        if row is not None:
            found[name] = row
    fresh = [row for name, row in found.items() if _is_news(row, stored.get(name))]
    if fresh and record:
        with catalog.write() as connection:
            write_corrections(connection, fresh)
    return Learned(
        {name: row.factor for name, row in found.items() if row.factor != 1.0},
        tuple(
            _change(row, stored.get(row.template_id))
            for row in fresh
            if row.factor != _in_force(stored.get(row.template_id))
        ),
        tuple(_drift(row, templates[name]) for name, row in found.items() if _has_drifted(row)),
        lengths,
    )


def _judged(
    inputs: Inputs,
    template: Template | None,
    frame: pl.DataFrame,
    before: CorrectionRow | None,
    now: datetime,
) -> CorrectionRow | None:
    """One template's correction now; None: there is none, and was none."""
    workloads = {w.name: w for w in inputs.scenario.workloads}
    workload = workloads.get(template.workload) if template is not None else None
    speed = None
    if template is not None and workload is not None:
        speed = _speed(inputs, template, workload, frame)
    if template is None or speed is None:
        return _gone(before, now) if before is not None and before.factor != 1.0 else None
    problem = next(
        p.problem
        for p in inputs.phases
        if (p.workload.name, p.problem.phase) == (template.workload, template.phase)
    )
    minutes = frame["minute"].to_list()
    factor = settled(factor_of(template, problem, speed.speed), _in_force(before))
    return CorrectionRow(
        now, inputs.scenario.name, template.id, template.workload, template.phase, factor,
        speed.speed, speed.kind, speed.minutes, frame["replica"].n_unique(), speed.among,
        speed.observed, speed.predicted, speed.row, min(minutes), max(minutes),
    )  # fmt: skip


def _speed(
    inputs: Inputs, template: Template, workload: Workload, frame: pl.DataFrame
) -> Speed | None:
    """None: too little was seen, or the template does not rest on today's figures."""
    problem = next(
        p.problem
        for p in inputs.phases
        if (p.workload.name, p.problem.phase) == (template.workload, template.phase)
    )
    classes = {name for name, _ in template.combination}
    if not classes <= problem.nodes.keys() or problem.key(template.combination) != template.id:
        return None
    ended = int(frame["measured"].sum())
    if not ended:
        return None
    nodes = {node.name: node for node in inputs.scenario.node_classes}
    bench = Bench(inputs.performance, nodes, inputs.scenario.placement)

    def column(name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return frame[name].cast(pl.Float64).fill_null(float("nan")).to_numpy()

    seen = Minutes(
        in_flight=column("in_flight"),
        decoding=column("decoding"),
        among=np.nan_to_num(column("among")),
        tpot_ms=column("tpot_ms"),
        timed_tokens=np.nan_to_num(column("timed_tokens")),
        requests_per_s=column("requests_per_s"),
        tokens_per_s=column("output_tokens_per_s"),
        prompt_tokens=int(frame["prompt_tokens"].sum()) / ended,
        output_tokens=int(frame["output_tokens"].sum()) / ended,
    )
    try:
        return speed_of(bench, template, workload, seen)
    except MissingProfileError:
        return None


def _gone(before: CorrectionRow, now: datetime) -> CorrectionRow:
    return replace(before, corrected_at=now, factor=1.0, kind=NO_EVIDENCE, minutes=0, replicas=0)


def _in_force(row: CorrectionRow | None) -> float:
    return 1.0 if row is None else row.factor


def _is_news(row: CorrectionRow, before: CorrectionRow | None) -> bool:
    """To be written: it differs, or what is written gets old."""
    if row.factor != _in_force(before):
        return True
    return (
        row.factor != 1.0 and before is not None and row.corrected_at - before.corrected_at >= AGAIN
    )


def _has_drifted(row: CorrectionRow) -> bool:
    return row.kind != NO_EVIDENCE and abs(row.speed - 1.0) > DRIFT


def _change(row: CorrectionRow, before: CorrectionRow | None) -> str:
    name = f"{row.workload} {row.phase.value} {row.template_id[:8]}"
    was = f"{_in_force(before):.0%} of its throughput"
    if row.kind == NO_EVIDENCE:
        return f"{name}: its correction ({was}) is gone, as the minutes behind it are"
    return f"{name}: planned with {row.factor:.0%} of its throughput (before: {was}); {_seen(row)}"


def _drift(row: CorrectionRow, template: Template) -> str:
    return (
        f"{row.workload} {row.phase.value} on {template.placement.describe()} "
        f"({row.template_id[:8]}): {_seen(row)}. The row behind it is {row.profile_row}; "
        "measure it again (`coral profile run`, `coral profile import`, `coral library build`)"
    )


def _seen(row: CorrectionRow) -> str:
    """The evidence in words."""
    unit = "ms per token" if row.kind == "tpot" else "tokens/s"
    if row.phase.value == "prefill":
        unit = "prompts/s"
    return (
        f"{row.observed:.3g} {unit} seen where the profile says {row.predicted:.3g}, with "
        f"{row.among:.3g} requests at a time ({row.minutes} minutes of {row.replicas} replicas)"
    )


def _length_notes(inputs: Inputs, seen: Mapping[str, SeenLengths]) -> tuple[str, ...]:
    """Models whose requests are shorter or longer than their templates were built for."""
    notes = []
    for name, found in seen.items():
        workloads = [w for w in inputs.scenario.workloads if w.model.name == name]
        if not workloads or found.requests < LEAST_REQUESTS:
            continue
        weights = [w.demand_rps for w in workloads]
        weights = weights if sum(weights) > 0.0 else [1.0] * len(workloads)
        for what, mean, planned in (
            ("prompts", found.prompt_tokens, [w.lengths.mean_input for w in workloads]),
            ("outputs", found.output_tokens, [w.lengths.mean_output for w in workloads]),
        ):
            expected = float(np.average(planned, weights=weights))
            if abs(mean / expected - 1.0) > LENGTHS_OFF:
                notes.append(
                    f"{name}: {what} of {mean:.0f} tokens on average in the last 24 hours "
                    f"({found.requests} requests), and its templates are for {expected:.0f} "
                    f"({', '.join(w.name for w in workloads)}): give `lengths` as they are and run "
                    "`coral library build`"
                )
    return tuple(notes)

"""Build the template library of one phase: level by level, streamed, resumable."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import polars as pl
from numpy.typing import NDArray

from catalog import reads, writes
from catalog.store import Catalog
from planner.placement.combinations import Members, SplitFloors
from planner.placement.guests import guest_rps
from planner.placement.latency import explain_no_template
from planner.placement.settings import PlacementSettings
from planner.placement.solution import Outcome
from planner.types import DISAGGREGATED, Phase, Template, describe_combination
from tasks import progress
from tasks.coral_task import coral_task
from tasks.inputs import PhaseInputs
from tasks.solving import Batch, Solvers

COMMIT_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class PhaseLibrary:
    """What one phase's build came to."""

    workload: str
    phase: Phase
    combinations: int
    reused: int
    solved: int
    searched: int  # of those solved: bounds were not enough
    outcomes: Mapping[str, int]  # combinations by outcome
    left_out: Mapping[str, int]  # combinations never solved, by reason
    unproven: int  # combinations of which an ILP hit its time limit
    seconds: float
    solver: str

    @property
    def kept(self) -> int:
        return self.outcomes.get(Outcome.KEPT, 0)

    @property
    def pruned(self) -> int:
        """Without a template by bounds alone."""
        return self.solved - self.searched


def build_phase(catalog: Catalog, inputs: PhaseInputs, solvers: Solvers) -> PhaseLibrary:
    """Solve every combination that the catalog does not hold yet, smallest first.

    A combination's floor is the best split into two smaller ones, so sizes go one after another;
    inside a size batches run side by side, and are committed as they come.
    """
    started = time.perf_counter()
    problem, total = inputs.problem, len(inputs.combinations)
    levels = inputs.combinations.by_size
    floors = SplitFloors(len(problem.names), len(levels))
    label = f"{problem.phase} {problem.workload}"
    keys = all_keys(inputs)
    with catalog.read() as connection:
        stored = reads.read_solutions(connection, keys)
    reused, solved, searched = len(stored), 0, 0
    outcomes = Counter(stored["outcome"].to_list())
    unproven = int((~stored["proven"]).sum())
    best_rps = np.full(total, np.nan)
    best_rps[stored["position"].to_numpy()] = stored["best_rps"].to_numpy()
    unsaved = _Unsaved(catalog, inputs)
    progress.report(label, reused, total)
    first = 0  # position of the level's first combination
    for members in levels:
        best = best_rps[first : first + len(members)]
        left = np.flatnonzero(np.isnan(best))
        level = members[left]
        for batch in solvers.run(problem, level, floors.floors(level), len(levels)):
            rows = left[batch.rows]
            best[rows] = batch.solved.best_rps
            unsaved.add([keys[first + row] for row in rows.tolist()], members[rows], batch)
            outcomes.update(batch.solved.outcomes)
            solved += len(rows)
            tried = batch.solved.searches.tolist()
            searched += sum(
                outcome is Outcome.KEPT or number > 0
                for outcome, number in zip(batch.solved.outcomes, tried, strict=True)
            )
            unproven += int((~batch.solved.proven).sum())
            progress.report(label, reused + solved, total)
            if unsaved.age_s > COMMIT_EVERY_S:
                unsaved.commit()
        floors.record(members, best)
        first += len(members)
    unsaved.commit()
    return PhaseLibrary(
        workload=problem.workload,
        phase=problem.phase,
        combinations=total,
        reused=reused,
        solved=solved,
        searched=searched,
        outcomes={str(outcome): count for outcome, count in outcomes.items()},
        left_out=inputs.combinations.left_out,
        unproven=unproven,
        seconds=time.perf_counter() - started,
        solver=solvers.kind,
    )


build_phase_task = coral_task("build-phase", build_phase)


def record_builds(
    catalog: Catalog, build_id: str, scenario: str, phases: Sequence[PhaseLibrary]
) -> None:
    """Append what a build did."""
    now = datetime.now(UTC)
    with catalog.write() as connection:
        for phase in phases:
            row = writes.BuildRow(
                build_id=build_id,
                scenario=scenario,
                workload=phase.workload,
                phase=phase.phase,
                combinations=phase.combinations,
                reused=phase.reused,
                solved=phase.solved,
                searched=phase.searched,
                kept=phase.kept,
                outcomes={**phase.outcomes, **phase.left_out},
                seconds=phase.seconds,
                solver=phase.solver,
            )
            writes.write_build(connection, row, now)


def require_templates(
    phases: Sequence[PhaseInputs],
    libraries: Sequence[PhaseLibrary],
    settings: PlacementSettings,
) -> None:
    """Every workload has templates of prefill and decode, or of aggregated serving.

    Raises an InputError with the best achievable latency where one has neither.
    """
    kept = {(library.workload, library.phase) for library in libraries if library.kept}
    for inputs in phases:
        name, phase = inputs.workload.name, inputs.problem.phase
        if (
            phase in DISAGGREGATED
            and (name, phase) not in kept
            and (name, Phase.AGGREGATED) not in kept
        ):
            raise explain_no_template(
                inputs.workload, inputs.problem, inputs.combinations, settings
            )


def share_templates(catalog: Catalog, phases: Sequence[PhaseInputs]) -> int:
    """Work out T[t, w] for templates and the other workloads of their model; how many were new."""
    new = 0
    for owner in phases:
        guests = [guest for guest in phases if may_share(owner, guest)]
        if not guests:
            continue
        with catalog.read() as connection:
            templates = reads.read_templates(connection, all_keys(owner))
            keys = [template.id for template in templates]
            ids = [g.problem.key(t.combination) for g in guests for t in templates]
            known = {row[:2] for row in reads.read_shares(connection, keys, ids)}
        for guest in guests:
            rows = []
            for template in templates:
                share = guest.problem.key(template.combination)
                if (template.id, share) in known:
                    continue
                raw = guest_rps(
                    guest.problem, owner.problem, template.combination, template.placement
                )
                rps = raw * guest.problem.terms.utilization
                rows.append((template.id, share, guest.workload.name, rps))
                progress.report(
                    f"share {owner.problem.phase} {owner.workload.name}", len(rows), len(templates)
                )
            with catalog.write() as connection:
                writes.write_shares(connection, rows)
            new += len(rows)
    return new


share_templates_task = coral_task("share-templates", share_templates)


def may_share(owner: PhaseInputs, guest: PhaseInputs) -> bool:
    """Whether a replica made for one workload can also serve the other."""
    return (
        owner.workload.name != guest.workload.name
        and owner.workload.model == guest.workload.model
        and owner.workload.dtype == guest.workload.dtype
        and owner.problem.phase is guest.problem.phase
    )


def all_keys(inputs: PhaseInputs) -> list[str]:
    """Keys of all combinations of a phase."""
    return [key for level in inputs.combinations.by_size for key in inputs.problem.keys(level)]


class _Unsaved:
    """Results of a phase that are not in the catalog yet."""

    def __init__(self, catalog: Catalog, inputs: PhaseInputs) -> None:
        self.catalog, self.inputs = catalog, inputs
        self.names = [json.dumps(name) for name in inputs.problem.names]
        self.frames: list[pl.DataFrame] = []
        self.templates: list[Template] = []
        self.committed = time.perf_counter()

    @property
    def age_s(self) -> float:
        return time.perf_counter() - self.committed

    def add(self, keys: Sequence[str], members: Members, batch: Batch) -> None:
        solved = batch.solved
        self.frames.append(
            pl.DataFrame(
                {
                    "solution_id": keys,
                    "combination": [_as_json(self.names, row) for row in members],
                    "outcome": [str(outcome) for outcome in solved.outcomes],
                    "best_rps": solved.best_rps,
                    "proven": solved.proven,
                    "searches": solved.searches,
                    "seconds": np.full(len(keys), batch.seconds / len(keys)),
                }
            )
        )
        self.templates += batch.templates.values()

    def commit(self) -> None:
        """Store them, and forget them."""
        if self.frames:
            with self.catalog.write() as connection:
                writes.write_solutions(
                    connection, self.inputs.workload, self.inputs.problem.phase,
                    pl.concat(self.frames), self.templates, datetime.now(UTC),
                )  # fmt: skip
            self.catalog.publish()
            self.frames, self.templates = [], []
        self.committed = time.perf_counter()


def _as_json(names: Sequence[str], row: NDArray[np.uint8]) -> str:
    """'[["L4 x1", 2]]': a combination as the catalog stores it; names are JSON already."""
    counts = Counter(row.tolist())
    return "[" + ", ".join(f"[{names[c]}, {n}]" for c, n in sorted(counts.items())) + "]"


def describe_missing(inputs: PhaseInputs, found: Sequence[int]) -> str:
    """'decode Qwen3-32B lacks 12 combinations, first L4 x1'; `found` are positions, rising."""
    first = next(n for n in range(len(found) + 1) if n >= len(found) or found[n] != n)
    combination = next(itertools.islice(inputs.combinations, first, None))
    problem, missing = inputs.problem, len(inputs.combinations) - len(found)
    return (
        f"{problem.phase} {problem.workload} lacks {missing} combinations, first "
        f"{describe_combination(combination)}"
    )

"""Build the template library of one phase: level by level, streamed, resumable."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from prefect import task
from prefect.cache_policies import NO_CACHE

from catalog import reads, writes
from catalog.store import Catalog
from planner.placement.combinations import split_floor
from planner.placement.latency import explain_no_template
from planner.placement.search import throughput_of
from planner.placement.settings import PlacementSettings
from planner.placement.stages import StageTable
from planner.types import DISAGGREGATED, Combination, Phase, describe_combination
from tasks import progress
from tasks.inputs import PhaseInputs
from tasks.solving import Solved, Solvers

KEPT = "kept"
NO_GAIN = "no better than its parts"
INFEASIBLE = "no placement inside the SLO"
SOLVER_NAME = "ilp"
COMMIT_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class PhaseLibrary:
    """What one phase's build came to."""

    workload: str
    phase: Phase
    keys: tuple[str, ...]  # of all its combinations
    reused: int
    solved: int
    outcomes: Mapping[str, int]  # combinations by outcome
    left_out: Mapping[str, int]  # combinations never solved, by reason
    unproven: int  # combinations of which an ILP hit its time limit
    seconds: float

    @property
    def kept(self) -> int:
        return self.outcomes.get(KEPT, 0)


def build_phase(catalog: Catalog, inputs: PhaseInputs, solvers: Solvers) -> PhaseLibrary:
    """Solve every combination that the catalog does not hold yet, smallest first.

    A combination's floor is the best split into two smaller ones, so sizes go one after another;
    inside a size batches run side by side, and each is committed as it comes.
    """
    started = time.perf_counter()
    problem = inputs.problem
    keys = {combination: problem.key(combination) for combination in inputs.combinations}
    with catalog.read() as connection:
        stored = reads.read_solutions(connection, list(keys.values()))
    label = f"{problem.phase} {problem.workload}"
    outcomes: Counter[str] = Counter(found.outcome for found in stored.values())
    unproven = sum(not found.proven for found in stored.values())
    best = {c: stored[key].best_rps for c, key in keys.items() if key in stored}
    done = len(stored)
    progress.report(label, done, len(keys))
    for level in inputs.combinations.by_size:
        jobs = [(c, split_floor(c, best)) for c in level if c not in best]
        pending: list[writes.SolutionRow] = []
        committed = time.perf_counter()
        for batch in solvers.run(problem, jobs) if jobs else ():
            for solved in batch:
                row = _row(inputs, keys[solved.combination], solved)
                pending.append(row)
                best[solved.combination] = row.best_rps
                outcomes[row.outcome] += 1
                unproven += not row.proven
            done += len(batch)
            progress.report(label, done, len(keys))
            if time.perf_counter() - committed > COMMIT_EVERY_S:
                _commit(catalog, pending)
                committed = time.perf_counter()
        _commit(catalog, pending)
    return PhaseLibrary(
        workload=problem.workload,
        phase=problem.phase,
        keys=tuple(keys.values()),
        reused=len(stored),
        solved=len(keys) - len(stored),
        outcomes=dict(outcomes),
        left_out=inputs.combinations.left_out,
        unproven=unproven,
        seconds=time.perf_counter() - started,
    )


build_phase_task = task(name="build-phase", cache_policy=NO_CACHE)(build_phase)


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
                combinations=len(phase.keys),
                reused=phase.reused,
                solved=phase.solved,
                kept=phase.kept,
                outcomes={**phase.outcomes, **phase.left_out},
                seconds=phase.seconds,
                solver=SOLVER_NAME,
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
                inputs.workload, inputs.problem, list(inputs.combinations), settings
            )


def share_templates(catalog: Catalog, phases: Sequence[PhaseInputs]) -> int:
    """Work out T[t, w] for templates and the other workloads of their model; how many were new."""
    new = 0
    for owner in phases:
        with catalog.read() as connection:
            keys = [owner.problem.key(c) for c in owner.combinations]
            templates = reads.read_templates(connection, keys)
            guests = [guest for guest in phases if may_share(owner, guest)]
            ids = [g.problem.key(t.combination) for g in guests for t in templates]
            known = {row[:2] for row in reads.read_shares(connection, keys, ids)}
        for guest in guests:
            table = StageTable(guest.problem)
            rows = []
            for template in templates:
                share = guest.problem.key(template.combination)
                if (template.id, share) in known:
                    continue
                raw = throughput_of(table, template.combination, template.placement)
                rps = raw * guest.problem.terms.utilization
                rows.append((template.id, share, guest.workload.name, rps))
                progress.report(
                    f"share {owner.problem.phase} {owner.workload.name}", len(rows), len(templates)
                )
            with catalog.write() as connection:
                writes.write_shares(connection, rows)
            new += len(rows)
    return new


share_templates_task = task(name="share-templates", cache_policy=NO_CACHE)(share_templates)


def may_share(owner: PhaseInputs, guest: PhaseInputs) -> bool:
    """Whether a replica made for one workload can also serve the other."""
    return (
        owner.workload.name != guest.workload.name
        and owner.workload.model == guest.workload.model
        and owner.workload.dtype == guest.workload.dtype
        and owner.problem.phase is guest.problem.phase
    )


def _row(inputs: PhaseInputs, key: str, solved: Solved) -> writes.SolutionRow:
    if solved.template is not None:
        outcome, best = KEPT, solved.template.placement.raw_rps
    else:
        outcome, best = (NO_GAIN if solved.floor_rps > 0 else INFEASIBLE), solved.floor_rps
    return writes.SolutionRow(
        key=key,
        workload=inputs.problem.workload,
        phase=inputs.problem.phase,
        combination=solved.combination,
        outcome=outcome,
        best_rps=best,
        proven=solved.proven,
        ilps=solved.ilps,
        seconds=solved.seconds,
        template=solved.template,
        asked=inputs.workload,
    )


def _commit(catalog: Catalog, rows: list[writes.SolutionRow]) -> None:
    if rows:
        with catalog.write() as connection:
            writes.write_solutions(connection, rows, datetime.now(UTC))
        catalog.publish()
        rows.clear()


def describe_missing(inputs: PhaseInputs, missing: Sequence[Combination]) -> str:
    """'decode Qwen3-32B lacks 12 combinations, first L4 x1'."""
    first = describe_combination(missing[0])
    problem = inputs.problem
    return f"{problem.phase} {problem.workload} lacks {len(missing)} combinations, first {first}"

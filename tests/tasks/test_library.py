"""Library builds: streamed, resumable, incremental, and clear about impossible SLOs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog import reads
from catalog.store import Catalog
from planner.errors import ImpossibleSloError, NoTemplateError
from planner.placement.solution import Outcome
from planner.scenario import ScenarioSpec
from planner.types import Phase
from tasks.allocation import read_library
from tasks.inputs import load_inputs
from tasks.library import all_keys, build_phase, require_templates
from tasks.scenario_file import read_scenario
from tasks.solving import Batch, Solvers


def tiny(**changes) -> ScenarioSpec:
    return read_scenario("tiny").model_copy(update=changes)


class StoppingSolvers(Solvers):
    """Solves a few batches, then dies like a killed process."""

    def __init__(self, batches: int) -> None:
        super().__init__(workers=0)
        self.left = batches

    def run(self, problem, members, floors, max_nodes) -> Iterator[Batch]:
        for batch in super().run(problem, members, floors, max_nodes):
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield batch


def build(catalog: Catalog, inputs, solvers: Solvers | None = None):
    with solvers or Solvers(workers=0) as chosen:
        return [build_phase(catalog, phase, chosen) for phase in inputs.phases]


def test_a_second_build_solves_nothing(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    inputs = load_inputs(catalog, tiny())
    first, second = build(catalog, inputs), build(catalog, inputs)
    assert [p.solved for p in second] == [0, 0, 0]
    assert [p.reused for p in second] == [p.combinations for p in first]
    assert [p.outcomes for p in second] == [p.outcomes for p in first]


def test_a_killed_build_goes_on_where_it_stopped(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tasks.library.COMMIT_EVERY_S", 0.0)
    monkeypatch.setattr("tasks.solving.FIRST_BATCH", {"exact": 1})
    monkeypatch.setattr("tasks.solving.BATCH_SECONDS", 0.0)
    catalog = Catalog(tmp_path / "killed")
    inputs = load_inputs(catalog, tiny())
    with pytest.raises(KeyboardInterrupt):
        build(catalog, inputs, StoppingSolvers(3))
    with catalog.read() as connection:
        keys = all_keys(inputs.phases[0])
        assert len(reads.read_solutions(connection, keys)) == 3
    again = build(catalog, inputs)
    assert (again[0].reused, again[0].solved) == (3, len(keys) - 3)
    fresh = Catalog(tmp_path / "fresh")
    build(fresh, load_inputs(fresh, tiny()))
    assert read_library(catalog, inputs) == read_library(fresh, inputs)


def test_a_new_node_class_adds_only_the_combinations_that_contain_it(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    build(catalog, load_inputs(catalog, tiny(node_classes=("L40S x1", "H100 x1"))))
    wider = build(catalog, load_inputs(catalog, tiny()))
    assert all(phase.reused > 0 and phase.solved > 0 for phase in wider)


def test_a_changed_profile_invalidates_only_what_used_it(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    before = load_inputs(catalog, tiny())
    with catalog.write() as connection:
        connection.execute(
            "UPDATE layer_profile SET linear_ms = linear_ms * 1.1 WHERE gpu_profile LIKE 'L40S%'"
        )
    after = load_inputs(catalog, tiny())
    for old, new in zip(before.phases, after.phases, strict=True):
        for combination in old.combinations:
            uses = any(name == "L40S x1" for name, _ in combination)
            assert (old.problem.key(combination) != new.problem.key(combination)) == uses


def with_slo(ttft_ms: float, tpot_ms: float, **changes) -> ScenarioSpec:
    spec = tiny(**changes)
    workload = spec.workloads[0]
    slo = workload.slo.model_copy(update={"ttft_ms": ttft_ms, "tpot_ms": tpot_ms})
    return spec.model_copy(update={"workloads": (workload.model_copy(update={"slo": slo}),)})


def best_of(catalog: Catalog, spec: ScenarioSpec, phase: Phase) -> None:
    inputs = load_inputs(catalog, spec)
    chosen = next(p for p in inputs.phases if p.problem.phase is phase)
    with Solvers(workers=0) as solvers:
        library = build_phase(catalog, chosen, solvers)
        require_templates([chosen], [library], inputs.scenario.placement)


def test_an_impossible_slo_is_named_with_the_best_achievable(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    with pytest.raises(ImpossibleSloError, match=r"TPOT of 5 ms; the best achiev") as found:
        best_of(catalog, with_slo(2000, 5), Phase.DECODE)
    achievable = float(str(found.value).split("achievable is ")[1].split(" ")[0])
    assert 5 < achievable < 80
    spec = with_slo(2000, achievable)  # the way out works, at one request at a time
    placement = spec.placement.model_copy(update={"decode_batch_sizes": (1,)})
    best_of(catalog, spec.model_copy(update={"placement": placement}), Phase.DECODE)
    with pytest.raises(ImpossibleSloError, match=r"TTFT of 300 ms; .* a TTFT of") as found:
        best_of(catalog, with_slo(300, 80), Phase.PREFILL)
    achievable = float(str(found.value).split("a TTFT of ")[1].split(" ")[0])
    best_of(catalog, with_slo(achievable, 80), Phase.PREFILL)
    with pytest.raises(ImpossibleSloError, match=r"TTFT of 50 ms"):
        best_of(catalog, with_slo(50, 80), Phase.PREFILL)


def test_a_hand_over_that_no_network_makes_is_named(tmp_path: Path) -> None:
    spec = with_slo(2000, 80, node_classes=("L40S x1",))
    placement = spec.placement.model_copy(update={"kv_handover_share": 0.01})
    with pytest.raises(ImpossibleSloError, match=r"no nodes receive the KV .* within 20 ms"):
        best_of(Catalog(tmp_path), spec.model_copy(update={"placement": placement}), Phase.DECODE)


def test_a_model_that_fits_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoTemplateError, match=r"no combination .* holds Qwen/Qwen3-14B \(28 GiB"):
        best_of(
            Catalog(tmp_path),
            with_slo(
                2000,
                80,
                node_classes=("L4 x1",),
                placement=tiny().placement.model_copy(update={"max_nodes": 1}),
            ),
            Phase.DECODE,
        )


def test_an_incomplete_library_is_named(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    inputs = load_inputs(catalog, tiny())
    with pytest.raises(
        NoTemplateError, match=r"not complete: prefill .* run `coral library build`"
    ):
        read_library(catalog, inputs)


def test_every_kept_combination_has_its_template(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    inputs = load_inputs(catalog, tiny())
    phases = build(catalog, inputs)
    assert len(read_library(catalog, inputs)) == sum(p.outcomes[Outcome.KEPT] for p in phases)

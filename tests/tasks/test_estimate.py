"""What a build has to do, said before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from catalog.store import Catalog
from planner.scenario import with_caps
from tasks.estimate import LargeBuildError, estimate_build, refuse_large
from tasks.inputs import load_inputs
from tasks.library import build_phase
from tasks.scenario_file import read_scenario
from tasks.solving import Solvers


def test_a_small_build_starts_unasked_and_a_built_one_has_nothing_left(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    inputs = load_inputs(catalog, read_scenario("tiny"))
    before = estimate_build(catalog, inputs, workers=2)
    assert before.combinations == sum(len(phase.combinations) for phase in inputs.phases)
    refuse_large(before)
    with Solvers(workers=0) as solvers:
        for phase in inputs.phases:
            build_phase(catalog, phase, solvers)
    after = estimate_build(catalog, inputs, workers=2)
    assert (after.combinations, after.seconds) == (0, 0.0)


def test_a_large_build_is_refused_with_its_size_and_time(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    inputs = load_inputs(catalog, read_scenario("extended"))
    estimate = estimate_build(catalog, inputs, workers=2)
    assert estimate.combinations == 1_644_267
    with pytest.raises(
        LargeBuildError, match=r"1,644,267 combinations .* minutes on 2 workers; pass --yes"
    ):
        refuse_large(estimate)
    four = load_inputs(catalog, with_caps(read_scenario("extended"), 4, 12.0))
    refuse_large(estimate_build(catalog, four, workers=2))


def test_too_many_to_list_are_counted_all_the_same(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    inputs = load_inputs(catalog, with_caps(read_scenario("extended"), 8, 1e6))
    estimate = estimate_build(catalog, inputs, workers=2)
    assert not estimate.exactly
    assert all("combinations" not in vars(phase) for phase in inputs.phases)  # never enumerated
    with pytest.raises(LargeBuildError, match=r"up to 55,945,\d+ combinations .* days"):
        refuse_large(estimate)

"""Best tokens per dollar over caps, against a search through all templates."""

from __future__ import annotations

from pathlib import Path

from catalog.store import Catalog
from planner.scenario import with_caps
from tasks.inputs import load_inputs
from tasks.library import build_phase
from tasks.scenario_file import read_scenario
from tasks.sensitivity import BEST, measure_sensitivity, plateau
from tasks.solving import Solvers


def swept(tmp_path: Path):
    catalog = Catalog(tmp_path)
    inputs = load_inputs(catalog, with_caps(read_scenario("tiny"), 3, 8.0))
    with Solvers(workers=0) as solvers:
        for phase in inputs.phases:
            build_phase(catalog, phase, solvers)
    return catalog, inputs, measure_sensitivity(catalog, inputs)


def test_points_are_those_of_libraries_built_with_the_caps(tmp_path: Path) -> None:
    """Sweeping one large library is the same as building a library for every cap."""
    _, _, found = swept(tmp_path / "large")
    for max_nodes in (1, 2):
        catalog = Catalog(tmp_path / f"small{max_nodes}")
        inputs = load_inputs(catalog, with_caps(read_scenario("tiny"), max_nodes, 8.0))
        with Solvers(workers=0) as solvers:
            for phase in inputs.phases:
                build_phase(catalog, phase, solvers)
        small = measure_sensitivity(catalog, inputs)
        expected = {
            (p.workload, p.phase): p.tokens_per_usd
            for p in small.by_nodes
            if p.max_nodes == max_nodes
        }
        swept_here = {
            (p.workload, p.phase): p.tokens_per_usd
            for p in found.by_nodes
            if p.max_nodes == max_nodes
        }
        assert swept_here == expected
        assert any(expected.values())


def test_more_never_hurts_and_the_plot_is_there(tmp_path: Path) -> None:
    catalog, inputs, found = swept(tmp_path)
    for points, caps in ((found.by_nodes, 3), (found.by_memory, 7)):
        assert len(points) == caps * len(inputs.phases)
        for phase in inputs.phases:
            values = [p.tokens_per_usd for p in points if p.phase is phase.problem.phase]
            assert values == sorted(values)
    assert 1 <= plateau(found.by_nodes, "max_nodes", BEST) <= 3
    assert all(0 <= p.class_mean_tokens_per_usd <= p.tokens_per_usd for p in found.by_nodes)
    assert found.plot.parent == catalog.home / "reports"
    assert found.plot.read_bytes().startswith(b"\x89PNG")

"""Node options switched off: fewer ways to use a node, and keys of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.perf.allreduce import AllReduce
from planner.perf.model import PerformanceModel
from planner.placement.combinations import SplitFloors, enumerate_combinations
from planner.placement.exact import ExactSolver
from planner.placement.profile import PhaseProblem, build_phase_problem
from planner.placement.settings import PlacementSettings
from planner.types import Link, Phase
from tests.builders import node_class, workload

ALL, WHOLE = PlacementSettings(), PlacementSettings(node_options="whole")
NODES = (node_class("L4", 1), node_class("L4", 8, Link.PCIE))
UNMEASURED = PerformanceModel(rows={}, calibrations={}, all_reduce=AllReduce({}, {}),
                              engine_overhead_ms={})  # fmt: skip


def problem(phase: Phase, settings: PlacementSettings, nodes=NODES) -> PhaseProblem:
    return build_phase_problem(workload(), phase, nodes, UNMEASURED, settings)


def test_whole_nodes_have_their_widest_group_alone() -> None:
    for settings, sizes in ((ALL, [1, 2, 4, 8]), (WHOLE, [8])):
        nodes = problem(Phase.DECODE, settings).nodes
        assert [option.tp for option in nodes["L4 x8"].options] == sizes
        assert [option.tp for option in nodes["L4 x1"].options] == [1]


def test_keys_of_existing_libraries_stay() -> None:
    """This key changes with FORMULATION_VERSION or the roofline's defaults alone."""
    pair = (("L4 x1", 1), ("L4 x8", 1))
    default, whole = problem(Phase.DECODE, ALL), problem(Phase.DECODE, WHOLE)
    assert default.key(pair) == "f19b2d36f9fa87dad0fc8668c185f3e8"
    assert whole.key(pair) != default.key(pair)
    alone = (("L4 x1", 2),)  # no node of several GPUs: one result for both
    assert whole.key(alone) == default.key(alone)


@pytest.mark.parametrize("phase", list(Phase))
def test_whole_nodes_never_serve_more(phase: Phase) -> None:
    fast = {"network_peak_gbit_per_s": 1e3, "network_baseline_gbit_per_s": 1e3}
    nodes = [replace(node, **fast) for node in NODES]
    best = {}
    for settings in (ALL, WHOLE):
        found = problem(phase, settings, nodes)
        solver, floors = ExactSolver(found, 2), SplitFloors(len(found.names), 2)
        rates = []
        for members in enumerate_combinations(found, 2, 1e9).by_size:
            solved = solver.solve(members, floors.floors(members))
            floors.record(members, solved.best_rps)
            rates.append(solved.best_rps)
        best[settings.node_options] = np.concatenate(rates)
    assert (best["whole"] <= best["all"] * (1 + 2e-4)).all()
    assert (best["whole"] < best["all"] * 0.99).any()

"""The programs as text: a change of a constraint shows as a change of a line.

After a change that is meant, run `python -m tests.planner.test_golden` and read the difference.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pulp
import pytest

from planner.allocation.options import AllocationOptions, Quota, ServiceRules
from planner.allocation.problem import AllocationInput, RunningReplicas, build_allocation
from planner.placement import ilp
from planner.placement.ilp import min_sum_pipeline, pipeline_columns
from planner.placement.stages import StageTable
from planner.types import Market, Offer, Phase, combination_of
from tests.builders import offer, random_problem, template, workload

GOLDEN = Path(__file__).parent / "golden"


def allocation_program() -> pulp.LpProblem:
    """Two workloads that share replicas, every phase, every market and every option."""
    shared = template("m", Phase.AGGREGATED, {"A x1": 2}, 2.0)
    data = AllocationInput.of(
        [workload("chat", 3.0, weight=2.0), workload("code", 1.0)],
        [
            template("p", Phase.PREFILL, {"A x1": 1}, 4.0),
            template("d", Phase.DECODE, {"A x1": 1, "B x1": 1}, 1.5),
            replace(shared, shared_rps={"code": 5.0}),
        ],
        [
            replace(offer("d1", "A x1", 2.0, 4), vcpus=8),
            replace(offer("d1", "A x1", 0.5, 4, Market.SPOT), vcpus=8),
            replace(offer("d1", "B x1", 1.0, 3), vcpus=4),
            Offer("d2", "type-A x1", "A x1", Market.OWNED, 0.0, 1, "owned", vcpus=8),
        ],
        held={("d1", "type-A x1", Market.SPOT): 1},
        running=[RunningReplicas(template("p", Phase.PREFILL, {"A x1": 1}, 4.0), "d1", 1)],
        options=AllocationOptions(
            quotas=(Quota(16, "d1", "type-A*", Market.SPOT),),
            largest_spot_share=0.5,
            budget_usd_per_hour=9.0,
            egress_usd_per_gib={"d1": 0.1},
        ),
        rules={
            "chat": ServiceRules(least_served=0.5, largest_domain_share=0.75, origin="d2"),
            "code": ServiceRules(domains=frozenset({"d1"})),
        },
    )
    allocation = build_allocation(data)
    allocation.problem.setObjective(allocation.cost)
    return allocation.problem


def placement_program(monkeypatch: pytest.MonkeyPatch) -> pulp.LpProblem:
    """The first ILP of a pair of nodes."""
    problem = replace(random_problem(1, Phase.DECODE, layers=3, classes=2), batch_sizes=(2,))
    combination = combination_of(dict.fromkeys(problem.nodes, 1))
    columns = pipeline_columns(StageTable(problem), combination, 1, 2, 0.25, 1e3)
    seen: list[pulp.LpProblem] = []
    solve = ilp.solve

    def catch(program: pulp.LpProblem, **options):
        seen.append(program)
        return solve(program, **options)

    monkeypatch.setattr(ilp, "solve", catch)
    min_sum_pipeline(columns, combination, 3, 1e3, 40.0, 10.0)
    return seen[0]


def text_of(problem: pulp.LpProblem, folder: Path) -> str:
    path = folder / "program.lp"
    problem.writeLP(str(path))
    return path.read_text()


def test_allocation_program_is_the_golden_one(tmp_path: Path) -> None:
    assert text_of(allocation_program(), tmp_path) == (GOLDEN / "allocation.lp").read_text()


def test_placement_program_is_the_golden_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = text_of(placement_program(monkeypatch), tmp_path)
    assert program == (GOLDEN / "placement.lp").read_text()


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        (
            "allocation",
            "A1_nodes A2_stock A2_owned A3_new A3_drop A3_ended A4_load A5_prefill A5_decode "
            "A6_demand A7_quota A8_spot_share A9_spread A10_budget A11_least_served",
        ),
        ("placement", "P1_layers P1_first P1_last P2_nodes P5_latency"),
    ],
)
def test_every_constraint_of_the_formulation_is_in_a_golden_file(name: str, labels: str) -> None:
    text = (GOLDEN / f"{name}.lp").read_text()
    assert [label for label in labels.split() if f"\n{label}" not in text] == []


if __name__ == "__main__":
    allocation_program().writeLP(str(GOLDEN / "allocation.lp"))
    with pytest.MonkeyPatch.context() as patch:
        placement_program(patch).writeLP(str(GOLDEN / "placement.lp"))

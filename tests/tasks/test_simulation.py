"""The latest plan under requests: figures beside the plan, wrong traces refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from catalog.store import Catalog
from coral.render_simulation import print_simulation, simulation_summary
from planner.errors import InputError, UnknownNameError
from simulator.errors import TraceError
from tasks.allocation import decide
from tasks.inputs import Inputs
from tasks.requests import Load
from tasks.simulation import NoFleetError, Simulation, simulate_plan

COLUMNS = ("timestamp_s", "model", "input_tokens", "output_tokens")


@pytest.fixture(scope="module")
def planned(core: tuple[Catalog, Inputs]) -> tuple[Catalog, Inputs]:
    catalog, inputs = core
    decide(catalog, inputs)
    return catalog, inputs


@pytest.fixture(scope="module")
def simulated(planned: tuple[Catalog, Inputs]) -> Simulation:
    return simulate_plan(*planned, Load(minutes=2.0))


def write(path: Path, *rows: tuple[object, ...], columns: tuple[str, ...] = COLUMNS) -> str:
    text = [",".join(columns), *(",".join(str(value) for value in row) for row in rows)]
    path.write_text("\n".join(text) + "\n")
    return str(path)


def test_every_workload_has_planned_and_simulated_figures(simulated: Simulation) -> None:
    summary = simulation_summary(simulated)
    assert summary["workloads"].keys() == simulated.planned.keys()
    for name, both in summary["workloads"].items():
        plan, run = both["planned"], both["simulated"]
        assert run["done"] == run["requests"] > 0
        assert run["goodput_tokens_per_s"] <= run["output_tokens_per_s"]
        assert run["offered_rps"] == pytest.approx(plan["demand_rps"], rel=0.35), name
        assert 0.0 < run["ttft_ms"]["p50"] <= run["ttft_ms"]["p95"]
    shares = summary["utilization_by_class"].values()  # a plan in a hurry may leave one idle
    assert all(0.0 <= share <= 1.0 for share in shares) and max(shares) > 0.0


def test_print_names_every_workload(simulated: Simulation, capsys) -> None:
    print_simulation(simulated)
    shown = capsys.readouterr().out
    assert all(name[:6] in shown for name in simulated.planned)


def test_a_workload_without_replicas_loses_its_requests(planned, tmp_path: Path) -> None:
    catalog, inputs = planned
    extra = replace(inputs.scenario.workloads[0], name="unplanned")
    scenario = replace(inputs.scenario, workloads=(*inputs.scenario.workloads, extra))
    path = write(tmp_path / "t.csv", *((k, "unplanned", 100, 10) for k in range(10)))
    found = simulate_plan(catalog, replace(inputs, scenario=scenario), Load(path))
    lost = next(run for run in found.simulated if run.workload == "unplanned")
    assert (lost.requests, lost.lost, lost.attainment) == (9, 9, 0.0)  # the first is warm-up


def test_csv_and_parquet_are_the_same(planned, tmp_path: Path) -> None:
    catalog, inputs = planned
    name = inputs.scenario.workloads[0].name
    path = write(tmp_path / "t.csv", *((k / 2, name, 100 + k, 10) for k in range(50)))
    pl.read_csv(path).write_parquet(tmp_path / "t.parquet")
    runs = [simulate_plan(catalog, inputs, Load(str(tmp_path / f"t.{end}"))) for end in
            ("csv", "parquet")]  # fmt: skip
    assert runs[0].simulated == runs[1].simulated
    assert runs[0].simulated[0].done == runs[0].simulated[0].requests > 40


def test_a_shipped_trace_comes_at_the_demand(planned) -> None:
    """Its p95 minute has the workload's demand; the lengths are its own, or the workload's."""
    catalog, inputs = planned
    found = simulate_plan(catalog, inputs, Load("azure2023_conv", minutes=58.0, factor=0.1))
    trace = found.result.trace
    for k, name in enumerate(trace.workloads):
        mine = trace.workload == k
        counts = np.bincount((trace.arrival_s[mine] // 60).astype(int), minlength=58)
        demand = found.planned[name].demand_rps
        assert np.quantile(counts, 0.95) / 60.0 == pytest.approx(0.1 * demand, rel=0.5)
        assert trace.input_tokens[mine].mean() == pytest.approx(1155, rel=0.25)
    code = list(trace.workloads).index("Qwen3-14B-code")
    own = simulate_plan(
        catalog, inputs, Load("azure2023_conv", minutes=20.0, own_lengths=True)
    ).result.trace
    assert own.input_tokens[own.workload == code].mean() == pytest.approx(2048, rel=0.15)


def test_every_workload_may_have_its_own_trace(planned, tmp_path: Path) -> None:
    catalog, inputs = planned
    path = tmp_path / "mine.csv"
    path.write_text("timestamp_s,input_tokens,output_tokens\n0,77,3\n1,77,3\n2,77,3\n")
    mixed = f"own,Qwen3-32B=servegen-m-small,Qwen3-14B-code={path}"
    trace = simulate_plan(catalog, inputs, Load(mixed, minutes=3.0)).result.trace
    names = list(trace.workloads)
    means = {n: trace.input_tokens[trace.workload == names.index(n)].mean() for n in names}
    assert means["Qwen3-14B-code"] == 77.0
    assert means["Qwen3-32B"] < 300  # short prompts, where its own are of 1155
    assert means["Qwen3-14B"] > 700
    with pytest.raises(UnknownNameError, match="unknown workload 'Qwen3-13B'"):
        simulate_plan(catalog, inputs, Load("Qwen3-13B=own"))


def test_a_run_leaves_rows_a_page_and_events(planned, tmp_path: Path) -> None:
    catalog, inputs = planned
    events = tmp_path / "events.parquet"
    found = simulate_plan(catalog, inputs, Load(minutes=1.0), events)
    frame = pl.read_parquet(events)
    assert len(frame) == found.result.trace.requests
    done = frame.filter(pl.col("status") == "done")
    assert (done["first_token_s"] > done["arrival_s"]).all()
    assert (done["finish_s"] >= done["first_token_s"]).all()
    assert found.report is not None
    page = found.report.read_text()
    assert page.count("<svg") == 3 and "src=" not in page and "<link" not in page
    _, rows = catalog.query(
        "SELECT workload, requests, attainment FROM simulation WHERE simulation_id = ?", [found.id]
    )
    said = {m.workload: (m.requests, m.attainment) for m in found.simulated}
    assert {name: tuple(rest) for name, *rest in rows} == said
    with pytest.raises(InputError, match="event log"):
        simulate_plan(catalog, inputs, Load(minutes=1.0), tmp_path / "no" / "e.parquet")


@pytest.mark.parametrize(
    ("rows", "columns", "error", "says"),
    [
        ([(1, "MODEL", 5, 5), (0, "MODEL", 5, 5)], COLUMNS, TraceError, "out of order"),
        ([(0, "MODEL", -5, 5)], COLUMNS, TraceError, "input_tokens -5"),
        ([(0, "MODEL", "", 5)], COLUMNS, TraceError, "no input_tokens"),
        ([(0, "MODEL", "many", 5)], COLUMNS, TraceError, "not numbers"),
        ([(0, "nobody", 5, 5)], COLUMNS, UnknownNameError, "unknown model 'nobody'"),
        ([(0, "MODEL", 5)], COLUMNS[:3], TraceError, "no column output_tokens"),
    ],
)
def test_wrong_files_are_refused(
    planned, tmp_path: Path, rows, columns, error: type[Exception], says: str
) -> None:
    catalog, inputs = planned
    model = inputs.scenario.workloads[0].name
    named = [tuple(model if value == "MODEL" else value for value in row) for row in rows]
    path = write(tmp_path / "t.csv", *named, columns=columns)
    with pytest.raises(error, match=says) as refused:
        simulate_plan(catalog, inputs, Load(path))
    assert refused.value.exit_code == 2


def test_nothing_planned_and_no_such_trace(planned, seeded: Catalog) -> None:
    catalog, inputs = planned
    with pytest.raises(NoFleetError, match="nothing was planned yet"):
        simulate_plan(seeded, inputs, Load())
    with pytest.raises(UnknownNameError, match="azure2023_conv"):
        simulate_plan(catalog, inputs, Load("azure2023_con"))
    with pytest.raises(TraceError, match="no trace file"):
        simulate_plan(catalog, inputs, Load("missing.csv"))

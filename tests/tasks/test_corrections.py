"""What serving teaches, from files of the inbox to the next plan and back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from catalog.reads import StoredFleet
from catalog.store import Catalog
from coral.cli import app
from executor.gateway.app import make_app
from executor.gateway.outbox import Outbox
from executor.gateway.replicas import SCHEMA
from executor.home import HomeFiles
from executor.routes import Route, Routes, write_routes
from planner.allocation.plan import PlannedReplicas
from planner.corrections import Minutes, speed_of
from planner.expected import Bench, Expected
from planner.scenario import ScenarioSpec
from planner.types import Phase, Template
from simulator.run import Result
from tasks.allocation import read_library
from tasks.corrections import NO_EVIDENCE, Learned, learn
from tasks.inputs import Inputs, load_inputs
from tasks.observed import load_inbox
from tasks.operating import Round, operate_once
from tasks.requests import Load
from tasks.scenario_file import read_scenario
from tasks.simulation import simulate_fleet
from tests.support.gateway import Engine, served
from tests.support.library import catalog_with
from tests.tasks.test_observed import write_minutes

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
DAY = timedelta(hours=24)


def spec(**placement: object) -> ScenarioSpec:
    base = read_scenario("tiny")
    return base.model_copy(
        update={
            "stock": base.stock.model_copy(update={"factor": 1.0}),
            "placement": base.placement.model_copy(update=placement),
        }
    )


@pytest.fixture
def catalog(tiny_library: Path, tmp_path: Path) -> Catalog:
    return catalog_with(tiny_library, tmp_path)


def round_at(catalog: Catalog, at: datetime) -> tuple[Round, Learned]:
    """As the flow does."""
    load_inbox(catalog, at)
    inputs = load_inputs(catalog, spec(), at)
    learned = learn(catalog, inputs, at)
    inputs = replace(inputs, corrections=learned.factors, notes=learned.notes)
    return operate_once(catalog, spec(), inputs, at), learned


def taught(catalog: Catalog, inputs: Inputs, at: datetime) -> Learned:
    """The part of a round that learns."""
    load_inbox(catalog, at)
    return learn(catalog, inputs, at)


@pytest.fixture(scope="module")
def planner_home(tiny_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return catalog_with(tiny_library, tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def inputs(planner_home: Catalog) -> Inputs:
    return load_inputs(planner_home, spec(), NOW)


@pytest.fixture(scope="module")
def plan(planner_home: Catalog) -> Sequence[PlannedReplicas]:
    """What is planned for tiny."""
    return planned(round_at(planner_home, NOW)[0])


def planned(done: Round) -> Sequence[PlannedReplicas]:
    assert done.decision is not None
    return [one for one in done.decision.coral.replicas if one.template.phase.in_cycles]


def write_loads(
    home: Path, inputs: Inputs, replicas: Sequence[PlannedReplicas], first: datetime, speed: float,
    minutes: int = 20, gateways: int = 1,
) -> None:  # fmt: skip
    """Files of gateways that saw nearly full replicas at so much of the profile's speed."""
    prompt, output = mean_lengths(inputs)
    for number in range(gateways):
        outbox = Outbox(home / "inbox", "replicas", SCHEMA, lambda: first.timestamp())
        for one in replicas:
            placement = one.template.placement
            load = 0.9 * placement.micro_batches * placement.micro_batch_size
            tpot_s = expected_ms(inputs, one.template, load) / 1e3 / speed
            mine = load / gateways
            tokens = round(mine * 60.0 / tpot_s)
            ended = max(1, round(tokens / output))
            outbox.add(
                {
                    "minute": first + timedelta(minutes=minute),
                    "replica": f"{one.template.id[:6]}-{replica}",
                    "template": one.template.id,
                    "model": "Qwen/Qwen3-14B",
                    "phase": one.template.phase.value,
                    "gateway": f"g{number}",
                    "in_flight_s": 60.0 * mine,
                    "decoding_s": 60.0 * mine,
                    "decoding_sq_s": 60.0 * mine**2,
                    "decode_s": tokens * tpot_s,
                    "measured": ended,
                    "prompt_tokens": round(ended * prompt),
                    "output_tokens": round(ended * output),
                    "other_tokens": 0,
                    "decode_tokens": tokens,
                }
                for minute in range(minutes)
                for replica in range(one.count)
            )
        outbox.write()


def expected_ms(inputs: Inputs, template: Template, requests: float) -> float:
    """What the profile says of a token among so many requests, at the planned mean lengths."""
    nodes = {node.name: node for node in inputs.scenario.node_classes}
    bench = Bench(inputs.performance, nodes, inputs.scenario.placement)
    (workload,) = inputs.scenario.workloads
    expected = Expected.of(bench, template, workload, *mean_lengths(inputs))
    return float(expected.tpot_ms(requests * np.ones(1))[0])


def mean_lengths(inputs: Inputs) -> tuple[float, float]:
    lengths = inputs.scenario.workloads[0].lengths
    return lengths.mean_input, lengths.mean_output


def test_slow_replicas_change_the_plan_until_the_evidence_is_gone(
    catalog: Catalog, inputs: Inputs
) -> None:
    first, nothing = round_at(catalog, NOW)
    assert nothing == Learned()
    write_loads(catalog.home, inputs, planned(first), NOW, speed=0.8, gateways=2)
    second, learned = round_at(catalog, NOW + timedelta(minutes=30))
    slow = {one.template.id: one for one in planned(first)}
    assert learned.factors.keys() == slow.keys()
    assert all(0.7 <= factor <= 0.81 for factor in learned.factors.values())
    assert len(learned.changed) == len(learned.drifts) == len(slow)
    for drift in learned.drifts:
        assert "layer_profile: Qwen/Qwen3-14B" in drift or "calibration: " in drift
        assert "measure it again" in drift and "ms per token seen" in drift
    assert second.decision is not None  # planned anew, with less
    assert second.decision.coral.cost_usd_per_hour > first.decision.coral.cost_usd_per_hour
    report = second.decision.report.read_text()
    assert "Serving corrects the throughput of" in report and "measure it again" in report
    still, same = round_at(catalog, NOW + timedelta(minutes=40))
    assert still.decision is None and same.factors == learned.factors and not same.changed
    # Other commands plan with it too, and it is shown with its evidence.
    assert load_inputs(catalog, spec(), NOW + timedelta(hours=3)).corrections == learned.factors
    assert load_inputs(catalog, spec(corrections="none"), NOW).corrections == {}
    catalog.publish(force=True)
    name = next(iter(slow))
    evidence = catalog.query("FROM correction_evidence WHERE template_id = ?", [name])[1]
    assert len(evidence) == 20 * slow[name].count  # minutes, both gateways' together
    # A day later nothing is left of it.
    assert load_inputs(catalog, spec(), NOW + DAY + timedelta(hours=1)).corrections == {}
    back, gone = round_at(catalog, NOW + DAY + timedelta(minutes=25))
    assert gone.factors == {} and not gone.drifts
    assert len(gone.changed) == len(slow) and all("is gone" in line for line in gone.changed)
    assert back.decision is not None
    with catalog.read() as connection:
        kinds = connection.execute(
            "SELECT DISTINCT factor, kind FROM correction_now WHERE scenario = 'tiny'"
        ).fetchall()
    assert kinds == [(1.0, NO_EVIDENCE)]


def test_what_runs_as_profiled_is_left_alone(
    catalog: Catalog, plan: Sequence[PlannedReplicas], inputs: Inputs
) -> None:
    write_loads(catalog.home, inputs, plan, NOW, speed=0.97)
    assert taught(catalog, inputs, NOW + timedelta(minutes=30)) == Learned()
    write_loads(catalog.home, inputs, plan, NOW + timedelta(minutes=30), speed=0.5, minutes=60)
    profiles = replace(inputs.scenario.placement, corrections="none")
    switched_off = replace(inputs, scenario=replace(inputs.scenario, placement=profiles))
    assert taught(catalog, switched_off, NOW + timedelta(hours=2)) == Learned()
    assert taught(catalog, inputs, NOW + timedelta(hours=2)).factors


def test_minutes_of_other_templates_and_too_few_teach_nothing(
    catalog: Catalog, plan: Sequence[PlannedReplicas], inputs: Inputs
) -> None:
    strange = replace(plan[0], template=replace(plan[0].template, id="f" * 32))
    write_loads(catalog.home, inputs, [strange], NOW, speed=0.5)
    write_loads(catalog.home, inputs, plan[:1], NOW, speed=0.5, minutes=5)
    assert taught(catalog, inputs, NOW + timedelta(minutes=30)) == Learned()


def test_a_draft_records_nothing(
    catalog: Catalog, plan: Sequence[PlannedReplicas], inputs: Inputs
) -> None:
    write_loads(catalog.home, inputs, plan, NOW, speed=0.7)
    at = NOW + timedelta(minutes=30)
    load_inbox(catalog, at)
    assert learn(catalog, inputs, at, record=False).factors
    with catalog.read() as connection:
        assert connection.execute("SELECT count(*) FROM correction").fetchall() == [(0,)]


def test_broken_files_of_replicas_are_set_aside(
    catalog: Catalog, plan: Sequence[PlannedReplicas], inputs: Inputs
) -> None:
    write_loads(catalog.home, inputs, plan[:1], NOW, speed=0.7, minutes=1)
    inbox = catalog.home / "inbox"
    (good,) = inbox.glob("replicas-*.parquet")
    rows = pl.read_parquet(good)
    rows.with_columns(decode_s=pl.lit(float("nan"))).write_parquet(inbox / "replicas-1.parquet")
    rows.with_columns(in_flight_s=-pl.col("in_flight_s")).write_parquet(
        inbox / "replicas-2.parquet"
    )
    rows.drop("template").write_parquet(inbox / "replicas-3.parquet")
    found = load_inbox(catalog, NOW)
    assert (found.files, len(found.broken)) == (1, 3)
    for name, said in (
        ("replicas-1", "decode_s is no amount"), ("replicas-2", "in_flight_s is no amount"),
        ("replicas-3", "no column template"),
    ):  # fmt: skip
        assert any(line.startswith(name) and said in line for line in found.broken)


def test_lengths_that_moved_are_said(catalog: Catalog, inputs: Inputs) -> None:
    model = "Qwen/Qwen3-14B"
    prompt, output = (round(tokens) for tokens in mean_lengths(inputs))
    write_minutes(catalog.home, {model: [300]}, NOW, lengths=(2 * prompt, output))
    (note,) = taught(catalog, inputs, NOW + timedelta(minutes=5)).lengths
    assert f"{model}: prompts of {2 * prompt} tokens" in note and "coral library build" in note
    write_minutes(catalog.home, {model: [10]}, NOW + DAY, lengths=(2 * prompt, output))
    assert taught(catalog, inputs, NOW + DAY + timedelta(minutes=30)).lengths == ()  # too few
    write_minutes(catalog.home, {model: [300]}, NOW + 2 * DAY, lengths=(prompt, output))
    assert taught(catalog, inputs, NOW + 2 * DAY + timedelta(minutes=30)).lengths == ()


def test_corrections_are_shown(
    catalog: Catalog, plan: Sequence[PlannedReplicas], inputs: Inputs
) -> None:
    def coral(*arguments: str) -> dict:
        home = ("--home", str(catalog.home), "--json")
        done = CliRunner().invoke(app, ["corrections", *arguments, *home])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return json.loads(done.stdout)

    now = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=40)
    write_loads(catalog.home, inputs, plan, now, speed=0.7)
    taught(catalog, inputs, now + timedelta(minutes=30))
    catalog.publish(force=True)
    shown = coral()
    rows = [dict(zip(shown["columns"], row, strict=True)) for row in shown["rows"]]
    assert {row["template_id"] for row in rows} == {one.template.id for one in plan}
    assert all(row["factor"] < 0.8 and row["kind"] == "tpot" for row in rows)
    found = coral("--evidence", rows[0]["template_id"][:8], "--limit", "3")
    assert len(found["rows"]) == 3 and "tpot_ms" in found["columns"]
    with pytest.raises(Exception, match="no correction of a template 'zz'"):
        coral("--evidence", "zz")


def test_a_gateway_before_a_slow_engine_corrects_its_template(
    catalog: Catalog, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End to end: requests, their minutes (a fifth of a second each), the round."""
    monkeypatch.setattr("planner.corrections.LEAST_MINUTES", 5)
    monkeypatch.setattr("planner.corrections.LEAST_TOKENS", 3)
    templates = read_library(catalog, inputs)
    one = min((t for t in templates if t.phase.in_cycles), key=places_of)
    width, engine, began = max(2, places_of(one) // 2), Engine(gap_s=0.1), time.time()

    def clock() -> float:
        return NOW.timestamp() + 300.0 * (time.time() - began)

    async def ask_on(client: httpx.AsyncClient, number: int) -> None:
        body = {"model": "Qwen/Qwen3-14B", "prompt": "x", "stream": True}
        await asyncio.sleep(0.3 * number / width)
        while time.time() < began + 2.2:
            assert (await client.post("/v1/completions", json=body)).status_code == 200

    async def many(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            await asyncio.gather(*(ask_on(client, number) for number in range(width)))

    with ExitStack() as stack:
        url = stack.enter_context(served(engine.app()))
        route = Route(
            replica_id="r1", model="Qwen/Qwen3-14B", phase=Phase.AGGREGATED, urls=(url,),
            template_id=one.id,
        )  # fmt: skip
        routes = Routes(models=("Qwen/Qwen3-14B",), routes=(route,))
        write_routes(HomeFiles(catalog.home).routes, routes)
        asyncio.run(many(stack.enter_context(served(make_app(catalog.home, clock=clock)))))
    learned = taught(catalog, inputs, NOW + timedelta(minutes=60))
    assert learned.factors == {one.id: 0.7}
    (drift,) = learned.drifts
    assert one.id[:8] in drift and "ms per token seen" in drift


def places_of(template: Template) -> int:
    return template.placement.micro_batches * template.placement.micro_batch_size


def test_simulated_replicas_run_at_their_profiles_speed(catalog: Catalog, inputs: Inputs) -> None:
    """The simulator steps through batches; the speed it is seen to have is 1, whatever the load."""
    nodes = {node.name: node for node in inputs.scenario.node_classes}
    bench = Bench(inputs.performance, nodes, inputs.scenario.placement)
    (workload,) = inputs.scenario.workloads
    mixed = [t for t in read_library(catalog, inputs) if t.phase is Phase.AGGREGATED]
    assert len(mixed) == 2
    for template in mixed:
        for load in (0.7, 0.85):
            rate = {workload.name: load * template.placement.raw_rps}
            key = (template.id, "here")
            fleet = StoredFleet("", 0.0, {key: 1}, {key: rate}, rate, rate)
            found = simulate_fleet(inputs, {template.id: template}, fleet, Load(minutes=20.0), {})
            speed = speed_of(bench, template, workload, minutes_of(found.result))
            assert speed is not None and speed.kind == "tpot"
            assert speed.speed == pytest.approx(1.0, abs=0.06), (load, speed)


def minutes_of(result: Result) -> Minutes:
    """What a gateway would have seen of a simulated replica, without the first five minutes."""
    first, last, output = result.first_ms, result.finish_ms, result.trace.output_tokens
    grid = np.arange(5 * 600, 20 * 600) * 100.0  # a tenth of a second apart
    decoding = np.searchsorted(np.sort(first), grid) - np.searchsorted(np.sort(last), grid)
    there = np.searchsorted(result.trace.arrival_s * 1e3, grid) - np.searchsorted(
        np.sort(last), grid
    )
    by_minute = decoding.reshape(15, 600).astype(float)
    minute = (last // 60_000).astype(int) - 5

    def summed(values: np.ndarray) -> np.ndarray:
        kept = (minute >= 0) & (minute < 15)
        return np.bincount(minute[kept], weights=values[kept], minlength=15)

    return Minutes(
        in_flight=there.reshape(15, 600).mean(axis=1),
        decoding=by_minute.mean(axis=1),
        among=(by_minute**2).mean(axis=1) / by_minute.mean(axis=1),
        tpot_ms=summed(last - first) / summed(output - 1.0),
        timed_tokens=summed(output - 1.0),
        requests_per_s=summed(np.ones(len(last))) / 60.0,
        tokens_per_s=summed(output.astype(float)) / 60.0,
        prompt_tokens=float(result.trace.input_tokens.mean()),
        output_tokens=float(output.mean()),
    )

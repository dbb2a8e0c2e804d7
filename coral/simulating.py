"""Commands that simulate plans: simulate, calibrate-caps, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coral.options import Json, Scenario, check_scenario
from coral.output import answer, flow_run
from coral.serving import Home


def add_simulations(app: typer.Typer) -> None:
    """Register them."""
    app.command()(simulate)
    app.command("calibrate-caps")(calibrate_caps)
    app.command()(evaluate)


def simulate(
    plan: Annotated[
        str, typer.Option("--plan", help="latest: the latest plan of the scenario.")
    ] = "latest",
    scenario: Scenario = "core",
    trace: Annotated[
        list[str] | None,
        typer.Option(
            "--trace",
            help="A CSV or Parquet file with timestamp_s, model, input_tokens, output_tokens; a "
            "shipped trace at the demand's rate: azure2023_conv, azure2023_code, "
            "mooncake_conversation, mooncake_synthetic, servegen-m-large, -m-mid, -m-small, "
            "-deepseek-r1; or own, the shipped one that each workload's lengths are of. "
            "WORKLOAD=TRACE for one of them, several times. [Poisson at the demand]",
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.1, help="Simulated minutes; a file has its own.")
    ] = 10.0,
    load: Annotated[
        float,
        typer.Option(
            "--load", min=0.0, help="Times the demand of the plan; of a file, times its requests."
        ),
    ] = 1.0,
    own_lengths: Annotated[
        bool,
        typer.Option("--own-lengths", help="The trace's arrivals with each workload's lengths."),
    ] = False,
    events: Annotated[
        Path | None,
        typer.Option("--events", help="Write what became of every request to this Parquet file."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of arrivals and lengths.")] = 0,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Serve requests with the latest plan in simulation: latencies, goodput, what is lost."""
    from planner.errors import UnknownNameError

    if plan != "latest":
        raise UnknownNameError("plan", plan, ["latest"])
    check_scenario(scenario, home)
    with flow_run():
        from coral.render_simulation import print_simulation, simulation_summary
        from flows.simulate import simulate as run

        result = run(
            scenario, home, ",".join(trace) if trace else None, minutes, load, seed, own_lengths,
            str(events) if events else None,
        )  # fmt: skip
    answer(result, as_json, simulation_summary, print_simulation)


def calibrate_caps(
    scenario: Scenario = "core",
    trace: Annotated[
        list[str] | None,
        typer.Option("--trace", help="As of coral simulate. [Poisson at the demand]"),
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", min=1.0, help="Of requests in every simulation.")
    ] = 5.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of arrivals and lengths.")] = 0,
    target: Annotated[
        float,
        typer.Option(
            "--target",
            min=0.5,
            max=0.999,
            help="Share of every workload's requests that must meet both objectives.",
        ),
    ] = 0.95,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Most plans that are made.")] = 20,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Find by simulation how full replicas may be planned; later plans use what is found."""
    check_scenario(scenario, home)
    with flow_run():
        from coral.render_calibration import calibration_summary, print_calibration
        from flows.calibrate_caps import calibrate_caps as run

        source = ",".join(trace) if trace else None
        result = run(scenario, home, source, minutes, seed, target, rounds)
    answer(result, as_json, calibration_summary, print_calibration)


def evaluate(
    scenario: Scenario = "core",
    hours: Annotated[float, typer.Option("--hours", min=0.5, help="Replayed.")] = 24.0,
    every: Annotated[float, typer.Option("--every", min=5.0, help="Minutes between plans.")] = 30.0,
    demand: Annotated[
        float, typer.Option("--demand", min=0.01, help="Mean demand, times the scenario's.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of market and requests.")] = 0,
    deadline: Annotated[
        float, typer.Option("--deadline", min=0.1, help="Seconds for one plan.")
    ] = 5.0,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Replay days for Coral, Homo and Cauchy: prices and stock that move, preemptions, requests."""
    check_scenario(scenario, home)
    with flow_run():
        from coral.render_evaluation import evaluation_summary, print_evaluation
        from flows.evaluate import evaluate as run

        result = run(scenario, home, hours, every, demand, seed, deadline)
    answer(result, as_json, evaluation_summary, print_evaluation)

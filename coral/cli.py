"""Commands. Heavy imports (Prefect, DuckDB, Dask) happen inside the command that needs them.

Exit codes: 0 done, 1 failed for a reason outside the input, 2 the input is wrong or impossible,
130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coral import __version__
from coral.fleet import fleet_app
from coral.market import market_app
from coral.operating import add_operations
from coral.options import Dask, Json, Scenario, Workers, Yes, check_scenario
from coral.output import answer, answer_rows, flow_run, print_json
from coral.profile import profile_app
from coral.scheduling import add_scheduling
from coral.serving import Home, add_commands
from coral.simulating import add_simulations
from coral.weights import weights_app

if TYPE_CHECKING:
    from planner.scenario import ScenarioSpec

app = typer.Typer(
    name="coral",
    help="Serve many LLMs at least cost on whatever GPUs the clouds have today.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
library_app = typer.Typer(
    help="The template library: how each model can run on which nodes.", no_args_is_help=True
)
app.add_typer(library_app, name="library")
app.add_typer(fleet_app, name="fleet")
app.add_typer(weights_app, name="weights")
app.add_typer(profile_app, name="profile")
app.add_typer(market_app, name="market")
add_commands(app)
add_simulations(app)
add_operations(app)
add_scheduling(app)


def main() -> None:
    """Entry point of the console command."""
    from coral.interrupt import stop_on_signals
    from planner.errors import CoralError

    stop_on_signals()
    try:
        code = app(standalone_mode=False)  # what typer.Exit said, or what a command returned
        sys.exit(code if isinstance(code, int) else 0)
    except CoralError as error:
        _fail(str(error), error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # a usage error of the command line
        if usage is not None:
            _fail(f"{usage()} Try 'coral --help'.", 2)
        if os.environ.get("CORAL_DEBUG"):
            raise
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            where = f" for {error.filename}" if error.filename else ""
            _fail(f"no room left on the disk{where}; free some and run it again", 2)
        _fail(f"{type(error).__name__}: {error} (set CORAL_DEBUG=1 for the whole trace)", 1)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"coral {__version__}")
        raise typer.Exit


@app.command()
def quickstart(
    scenario: Scenario = "core",
    home: Home = None,
    dask: Dask = None,
    workers: Workers = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Build the template library, plan with it, simulate the plan, show all beside a baseline."""
    _check_build(scenario, home, dask, workers, yes)
    with flow_run():
        from coral.render import print_library, print_plan, summary
        from coral.render_simulation import print_in_brief, simulated_summary
        from flows.quickstart import quickstart as run

        result = run(scenario, home, dask, workers)
    if as_json:
        print_json({**summary(result.allocation), **simulated_summary(result.simulation)})
        return
    print_library(result.library)
    print_plan(result.allocation)
    print_in_brief(result.simulation, calibrated=bool(result.allocation.inputs.caps))


@library_app.command("build")
def library_build(
    scenario: Scenario = "core",
    home: Home = None,
    dask: Dask = None,
    workers: Workers = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Solve the placement of every combination of nodes that the database does not hold yet."""
    _check_build(scenario, home, dask, workers, yes)
    with flow_run():
        from coral.render import library_summary, print_library
        from flows.build_library import build_library as run

        result = run(scenario, home, dask, workers)
    answer(result, as_json, library_summary, print_library)


@app.command()
def allocate(
    scenario: Scenario = "core",
    what_if: Annotated[
        list[Path] | None,
        typer.Option(
            "--what-if",
            help="CSV of other prices, stock or demand: plan with it and show what differs; "
            "nothing is recorded. May be given several times.",
        ),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Choose what to run where, with the library in the database."""
    if what_if:
        _answer_what_if(scenario, what_if, home, as_json)
        return
    check_scenario(scenario, home)
    with flow_run():
        from coral.render import print_plan, summary
        from flows.allocate import allocate as run

        result = run(scenario, home)
    answer(result, as_json, summary, print_plan)


@library_app.command("show")
def library_show(
    workload: Annotated[str | None, typer.Option(help="Only templates of this workload.")] = None,
    phase: Annotated[str | None, typer.Option(help="prefill, decode or aggregated.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Only templates with this GPU: L40S.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Only with so many nodes.")] = None,
    sort: Annotated[
        str, typer.Option(help="tokens_per_usd, throughput_rps, usd_per_hour or nodes.")
    ] = "tokens_per_usd",
    limit: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 20,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show templates, the best tokens per dollar first."""
    from tasks.library_view import show_library

    columns, rows = show_library(home, workload, phase, gpu, nodes, sort, limit)
    answer_rows(columns, rows, as_json)


@library_app.command("sensitivity")
def library_sensitivity(
    scenario: Scenario = "core",
    max_nodes: Annotated[
        int, typer.Option("--max-nodes", min=1, max=8, help="Sweep N_max from 1 to this.")
    ] = 6,
    memory_ratio: Annotated[
        float, typer.Option("--memory-ratio", min=2.0, help="Sweep rho from 2 to this.")
    ] = 16.0,
    home: Home = None,
    dask: Dask = None,
    workers: Workers = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """What larger combinations are worth: best tokens per dollar over N_max and rho, plotted."""
    from planner.scenario import with_caps

    _check_build(
        scenario, home, dask, workers, yes, lambda spec: with_caps(spec, max_nodes, memory_ratio)
    )
    with flow_run():
        from coral.render import print_sensitivity, sensitivity_summary
        from flows.sensitivity import library_sensitivity as run

        result = run(scenario, home, max_nodes, memory_ratio, dask, workers)
    answer(result, as_json, sensitivity_summary, print_sensitivity)


@app.command()
def explain(
    scenario: Scenario = "core",
    without: Annotated[
        str | None,
        typer.Option(help="Also find the best plan without this GPU type: H100."),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Why the latest plan is as it is: costs, shortfalls, what binds, what would change it."""
    from coral.progress import progress_bars
    from coral.render_why import explanation_summary, print_explanation
    from tasks.explain import explain_latest

    with progress_bars():
        found = explain_latest(home, scenario, without)
    answer(found, as_json, explanation_summary, print_explanation)


@app.command()
def compare(
    scenario: Scenario = "core",
    suite: Annotated[
        bool, typer.Option("--suite", help="Over the fixed suite of markets and demands.")
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Over a sweep: demand, stock, or domains (the same stock over more of them)."
        ),
    ] = None,
    only: Annotated[
        str,
        typer.Option(help="Of the suite or sweep only cases of such names: 'scarce-*'."),
    ] = "*",
    ablate: Annotated[
        bool,
        typer.Option("--ablate", help="Switch Coral's levers off one by one: what each saves."),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            help="With all templates (any), with those that stock vLLM can run (vllm), or both, "
            "which takes twice as long."
        ),
    ] = "both",
    deadline: Annotated[
        float,
        typer.Option(
            "--deadline",
            min=0.1,
            help="Seconds for one plan. Short ones leave gaps (see that column): at 10 s some 5% "
            "of the cost on `core`; longer ones close them for Coral and baselines alike.",
        ),
    ] = 10.0,
    simulate_minutes: Annotated[
        float,
        typer.Option(
            "--simulate-minutes",
            min=0.0,
            help="Also serve so many minutes of requests with every plan, in simulation; 0: not.",
        ),
    ] = 2.0,
    home: Home = None,
    dask: Dask = None,
    workers: Workers = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Plan the same inputs with Coral and with every baseline, with the library in the database.

    --ablate also needs a library without node options, and builds it (--dask, --workers, --yes).
    """
    if suite and sweep:
        _fail("--suite and --sweep are two things to compare over: leave one out", 2)
    if sweep not in {None, "demand", "stock", "domains"}:
        _fail(f"unknown sweep {sweep!r}: demand, stock or domains", 2)
    if engine not in {"any", "vllm", "both"}:
        _fail(f"unknown engine {engine!r}: any, vllm or both", 2)
    if ablate:
        from planner.scenario import with_whole_nodes

        _check_build(scenario, home, dask, workers, yes, with_whole_nodes)
    else:
        check_scenario(scenario, home)
    with flow_run():
        from coral.render_compare import comparison_summary, print_comparison
        from flows.compare import compare as run

        result = run(
            scenario, home, suite, sweep, only, ablate, engine, deadline, simulate_minutes, dask,
            workers,
        )  # fmt: skip
    answer(result, as_json, comparison_summary, print_comparison)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help='For example "FROM best_templates LIMIT 5".')],
    form: Annotated[
        str, typer.Option("--format", help="table, csv, json (a list of rows) or parquet.")
    ] = "table",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file to write. [standard output]")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Run SQL on the read-only snapshot of the database; it never meets a lock.

    Views to start with: best_templates, allocation_history, model_cost_by_day, spend_by_day,
    fleet_now, demand_by_minute, attainment_by_minute, price_now, price_change, capacity_failure,
    market_gap, rejected_offers (docs/sql.md).
    """
    from tasks.home import open_catalog

    catalog = open_catalog(home)
    if form == "table" and output is None:
        columns, rows = catalog.query(query)
        answer_rows(columns, rows, as_json)
        return
    from tasks.sql_output import write_answer

    count = write_answer(catalog, query, form, output)
    if as_json:
        print_json({"rows": count, "format": form, "output": output and str(output)})
    elif output is not None:
        typer.echo(f"{count} rows in {output}", err=True)


def _answer_what_if(scenario: str, files: list[Path], home: str | None, as_json: bool) -> None:
    from coral.progress import progress_bars
    from coral.render_why import print_what_if, what_if_summary
    from tasks.what_if import what_if

    with progress_bars():
        found = what_if(scenario, files, home)
    answer(found, as_json, what_if_summary, print_what_if)


def _check_build(
    scenario: str,
    home: str | None,
    dask: str | None,
    workers: int | None,
    yes: bool,
    variant: Callable[[ScenarioSpec], ScenarioSpec] | None = None,
) -> None:
    """Check the input and the Dask scheduler; ask before a build of many combinations."""
    from tasks.estimate import estimate_build, refuse_large
    from tasks.home import open_catalog
    from tasks.inputs import load_inputs
    from tasks.scenario_file import read_scenario

    if dask and workers is not None:
        _fail("--dask names workers that run already, --workers starts some here: leave one out", 2)
    catalog, spec = open_catalog(home), read_scenario(scenario)
    inputs = load_inputs(catalog, variant(spec) if variant else spec)
    estimate = estimate_build(catalog, inputs, dask, workers)
    if yes or not estimate.is_large:
        return
    if not sys.stdin.isatty():
        refuse_large(estimate)
    if not typer.confirm(f"{estimate.describe()}. Start?", err=True):
        typer.echo("nothing was built", err=True)
        raise typer.Exit


def _fail(message: str, code: int) -> None:
    typer.echo(f"coral: {message}", err=True)
    sys.exit(code)

"""`coral profile`: measure layers, import tables, show and calibrate on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from coral.options import Json
from coral.output import answer, answer_rows, flow_run
from coral.serving import Home

profile_app = typer.Typer(
    help="Tables of layer times: measured here, imported, shown.", no_args_is_help=True
)
Gpu = Annotated[
    str | None, typer.Option(help="GPU type that the tables are filed under. [the device's name]")
]
Name = Annotated[str | None, typer.Option(help="Model name. [of its folder]")]


@profile_app.command("run")
def profile_run(
    model: Annotated[Path, typer.Argument(help="A model's folder, or its config.json.")],
    gpu: Gpu = None,
    name: Name = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="About how long; what is left out is said.")
    ] = 10.0,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    backend: Annotated[
        str, typer.Option(help="vllm (its own steps), torch (a layer of torch's), or auto.")
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32. [bfloat16; float32 on a CPU]")
    ] = "auto",
    tp: Annotated[
        list[int] | None, typer.Option(help="Tensor parallel sizes. [all that the machine has]")
    ] = None,
    cores: Annotated[
        list[str] | None, typer.Option(help="CPU core groups that stand for GPUs: 0, or 0-3.")
    ] = None,
    max_batch: Annotated[int | None, typer.Option(min=1, help="Largest decode batch.")] = None,
    max_context: Annotated[int | None, typer.Option(min=32, help="Largest context.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=32, help="Most prefill tokens.")] = None,
    python: Annotated[
        str | None,
        typer.Option(help="Interpreter with torch, and vLLM. [.venv-vllm, else this one]"),
    ] = None,
    serving: Annotated[
        bool, typer.Option(help="Also run the whole engine for a moment (with vLLM).")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Measure on a busy GPU too.")] = False,
    dask: Annotated[
        str | None,
        typer.Option(help='Once on every host whose Dask workers have --resources "GPU=1".'),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Measure one layer of a model from its config.json and take the tables into the database."""
    from tasks.profile_run import ProfileRequest, check_request, read_model

    sizes = {"batch": max_batch, "context": max_context, "tokens": max_tokens}
    options: dict[str, Any] = {
        "python": python, "device": device, "backend": backend, "dtype": dtype,
        "minutes": minutes, "tp": tuple(tp or ()), "cores": tuple(cores or ("0",)),
        "serving": serving, "force": force,
        "limits": tuple((key, value) for key, value in sizes.items() if value is not None),
    }  # fmt: skip
    config, found = read_model(model, name)
    check_request(ProfileRequest(config, found, **options), here=dask is None)
    with flow_run():
        from coral.render_profile import print_profiles, profiles_summary
        from flows.profile_gpu import profile_gpu as run

        result = run(str(model), gpu, name, options, home, dask)
    answer(result, as_json, profiles_summary, print_profiles)


@profile_app.command("import")
def profile_import(
    file: Annotated[
        str,
        typer.Argument(
            help="A profile (.parquet), a CSV, raw points, or aiconfigurator:SYSTEM "
            "(such as aiconfigurator:h200_sxm, with --name and --gpu)."
        ),
    ],
    gpu: Gpu = None,
    name: Name = None,
    tp: Annotated[
        list[int] | None, typer.Option(help="Of aiconfigurator: tensor parallel sizes. [1 2 4 8]")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Take a profile into the database, in place of earlier tables of the same."""
    from datetime import UTC, datetime

    from coral.render_profile import print_imported, profile_summary
    from tasks.aiconfigurator import PREFIX
    from tasks.profile_catalog import import_file, import_system

    now = datetime.now(UTC)
    if file.startswith(PREFIX):
        found = import_system(home, file.removeprefix(PREFIX), gpu, name, tuple(tp or ()), now)
    else:
        found = import_file(home, Path(file), gpu, name, now)
    answer(found, as_json, profile_summary, print_imported)


@profile_app.command("show")
def profile_show(
    model: Annotated[str | None, typer.Option(help="Of this model; needs --gpu.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Of this GPU type; needs --model.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size.")] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Draw points, interpolation and roofline: FILE.svg.")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List the tables, or show one: its points, and the whole engine beside it."""
    from planner.errors import InputError
    from tasks.profile_catalog import list_tables, read_table

    if model is None and gpu is None and plot is None:
        answer_rows(*list_tables(home), as_json)
        return
    if model is None or gpu is None:
        raise InputError("one table is that of a --model on a --gpu: give both")
    from coral.render_profile import print_table, table_summary

    found = read_table(home, model, gpu, tp)
    if plot is not None:
        from tasks.profile_plot import draw_table

        draw_table(found, plot)
    answer(found, as_json, table_summary, print_table)


@profile_app.command("calibrate")
def profile_calibrate(
    gpu: Annotated[str, typer.Argument(help="GPU type, by market or profile name.")],
    scope: Annotated[str, typer.Option(help="dense or moe.")] = "dense",
    save: Annotated[
        bool, typer.Option("--save", help="Plan with the factors where nothing is measured.")
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Fit a GPU's roofline on what of it is measured; error by leaving one model out."""
    from coral.render_profile import fit_summary, print_fit
    from planner.errors import InputError
    from tasks.profile_catalog import calibrate

    if scope not in {"dense", "moe"}:
        raise InputError(f"unknown scope {scope!r}: dense or moe")
    answer(calibrate(home, gpu, scope, save), as_json, fit_summary, print_fit)

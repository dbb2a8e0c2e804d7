"""`coral weights`: models in an object store, and nodes that fetch their layers from it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coral.options import Json
from coral.output import print_json

if TYPE_CHECKING:
    from executor.weights.moving import Moved, Progress

weights_app = typer.Typer(
    help="Models in an object store: pushed once, fetched by layers.", no_args_is_help=True
)
Url = Annotated[str, typer.Argument(help="A folder, or s3://bucket/prefix.")]


@weights_app.command("push")
def weights_push(
    folder: Annotated[Path, typer.Argument(help="The model's folder: config.json, safetensors.")],
    url: Url,
    as_json: Json = False,
) -> None:
    """Put a model there; what is there already stays."""
    from executor.weights.moving import push
    from executor.weights.store import open_store

    with _bar(f"push {folder.name}") as progress:
        moved = push(folder, open_store(url), progress)
    _say(moved, as_json, url)


@weights_app.command("fetch")
def weights_fetch(
    url: Url,
    folder: Annotated[Path, typer.Argument(help="Where the files go; what is right stays.")],
    first_layer: Annotated[int, typer.Option(min=0, help="Of the layers that are needed.")] = 0,
    layers: Annotated[int | None, typer.Option(min=1, help="How many are needed. [all]")] = None,
    command: Annotated[
        list[str] | None, typer.Argument(help="What to become when all is there: -- vllm serve ...")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="A file that says in JSON what was moved, and how long it took."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Get a model, or the files that some of its layers are in."""
    from executor.weights.moving import fetch
    from executor.weights.store import open_store

    with _bar(f"fetch {url}") as progress:
        moved = fetch(open_store(url), folder, first_layer, layers, progress)
    _say(moved, as_json, str(folder))
    if record is not None:
        record.write_text(json.dumps(asdict(moved)))
    if command:
        os.execvp(command[0], command)


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Progress]:
    """A bar of MiB on a terminal."""
    from coral.progress import progress_bars
    from tasks.progress import report

    with progress_bars():
        yield lambda done, total: report(f"{what} (MiB)", done >> 20, max(1, total >> 20))


def _say(moved: Moved, as_json: bool, where: str) -> None:
    if as_json:
        print_json({"where": where, **asdict(moved)})
        return
    typer.echo(
        f"{moved.files} files, {moved.bytes / 2**20:.1f} MiB at {where}; "
        f"{moved.bytes_moved / 2**20:.1f} MiB moved in {moved.seconds:.1f} s.",
        err=True,
    )

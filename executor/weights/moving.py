"""Push a model once; fetch what a stage needs, checked, going on where a fetch was cut off."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from executor.weights.manifest import (
    NAME,
    Manifest,
    WeightFile,
    WeightsError,
    checksum,
    make_manifest,
    parse_manifest,
)
from executor.weights.store import Store

AT_ONCE = 4  # files
TRIES = 5  # of one file, each from where the last was cut off
PAUSE_S = 0.5

Progress = Callable[[int, int], None]  # bytes there, bytes in all


@dataclass(frozen=True, slots=True)
class Moved:
    """What was moved."""

    files: int
    bytes: int  # in all
    bytes_moved: int  # of them now
    seconds: float


def push(folder: Path, store: Store, progress: Progress = lambda *_: None) -> Moved:
    """Files first, the manifest last: a push that was cut off is no model.

    Files of the same checksum that are there already stay. Raises WeightsError.
    """
    began, manifest = time.monotonic(), make_manifest(folder)
    before = _known(store)
    total, moved, there = sum(file.size for file in manifest.files), 0, 0
    for file in manifest.files:
        same = before.get(file.name) == file.sha256 and store.size(file.name) == file.size
        if not same:
            store.write(file.name, folder / file.name)
            moved += file.size
        there += file.size
        progress(there, total)
    draft = folder / NAME
    draft.write_text(manifest.model_dump_json())
    store.write(NAME, draft)
    return Moved(len(manifest.files), total, moved, time.monotonic() - began)


def fetch(
    store: Store,
    folder: Path,
    first_layer: int = 0,
    layers: int | None = None,
    progress: Progress = lambda *_: None,
) -> Moved:
    """Files of a stage (of the whole model without `layers`) into a folder.

    What is there and right stays; several processes of a node fetch once. Raises WeightsError.
    """
    began, manifest = time.monotonic(), read_manifest(store)
    count = manifest.layers if layers is None else layers
    if first_layer + count > manifest.layers:
        raise WeightsError(f"{store.url} has {manifest.layers} layers, not {first_layer + count}")
    needed = manifest.needed(first_layer, count, first_layer + count == manifest.layers)
    total = sum(file.size for file in needed)
    folder.mkdir(parents=True, exist_ok=True)
    got: list[int] = []

    def one(file: WeightFile) -> int:
        moved = _fetch_file(store, folder, file)
        got.append(file.size)
        progress(sum(got), total)
        return moved

    with FileLock(folder / ".coral-fetch.lock"), ThreadPoolExecutor(AT_ONCE) as pool:
        moved = sum(pool.map(one, needed))
    return Moved(len(needed), total, moved, time.monotonic() - began)


def read_manifest(store: Store) -> Manifest:
    """Raises WeightsError: no model was pushed there."""
    if store.size(NAME) is None:
        raise WeightsError(
            f"no model at {store.url}; push one with `coral weights push FOLDER {store.url}`"
        )
    text = b"".join(store.read(NAME)).decode()
    return parse_manifest(text, f"{store.url}/{NAME}")


def _known(store: Store) -> dict[str, str]:
    if store.size(NAME) is None:
        return {}
    return {file.name: file.sha256 for file in read_manifest(store).files}


def _fetch_file(store: Store, folder: Path, file: WeightFile) -> int:
    """Bytes that were moved now."""
    target = folder / file.name
    if target.is_file() and target.stat().st_size == file.size and _is_marked(target, file):
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    part, moved = target.with_name(target.name + ".part"), 0
    for attempt in range(TRIES):
        try:
            moved += _go_on(store, part, file)
            break
        except WeightsError:
            if attempt == TRIES - 1:
                raise
            time.sleep(PAUSE_S * 2**attempt)
    found = checksum(part)
    if found != file.sha256:
        part.unlink()
        raise WeightsError(
            f"{store.url}/{file.name} has checksum {found[:12]}, its manifest says "
            f"{file.sha256[:12]}; push the model again"
        )
    part.replace(target)
    _mark_path(target).write_text(json.dumps({"sha256": file.sha256}))
    return moved


def _go_on(store: Store, part: Path, file: WeightFile) -> int:
    """From where the last try was cut off."""
    start = part.stat().st_size if part.exists() else 0
    if start > file.size:
        part.unlink()
        start = 0
    if start == file.size and file.size:
        return 0
    with part.open("ab") as target:
        for piece in store.read(file.name, start):
            target.write(piece)
    if part.stat().st_size != file.size:
        raise WeightsError(
            f"{store.url}/{file.name} gave {part.stat().st_size} bytes of {file.size}"
        )
    return file.size - start


def _mark_path(target: Path) -> Path:
    """Says which checksum a file had when it was fetched: hashing 100 GB again takes minutes."""
    return target.with_name(f".{target.name}.coral")


def _is_marked(target: Path, file: WeightFile) -> bool:
    try:
        known = json.loads(_mark_path(target).read_text())
    except (OSError, ValueError):
        return checksum(target) == file.sha256
    return bool(known.get("sha256") == file.sha256)

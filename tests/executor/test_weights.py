"""Weights in a store: pushed once, fetched by layers, checked, going on where they were cut off."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from executor.stage_plan import EngineSettings, Host, plan_stages
from executor.weights import moving
from executor.weights.manifest import NAME, WeightsError, make_manifest
from executor.weights.moving import fetch, push, read_manifest
from executor.weights.store import FolderStore, open_store
from planner.types import Phase, Placement, Stage, StageNode

LAYERS = 4
SHARDS = {  # as a model of four layers is cut: a layer may lie in two files
    "model-1.safetensors": ["model.embed_tokens.weight", "model.layers.0.a", "model.layers.1.a"],
    "model-2.safetensors": ["model.layers.1.b", "model.layers.2.a"],
    "model-3.safetensors": ["model.layers.3.a", "model.norm.weight", "lm_head.weight"],
}


def safetensors(path: Path, names: list[str], size: int = 3000) -> None:
    header = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [n * size, (n + 1) * size]}
        for n, name in enumerate(names)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    data = b"".join(bytes([len(name)]) * size for name in names)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("the same again")
    for name, tensors in SHARDS.items():
        safetensors(folder / name, tensors)
    return folder


@pytest.fixture
def store(tmp_path: Path, model: Path) -> FolderStore:
    found = FolderStore(str(tmp_path / "store"))
    push(model, found)
    return found


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if not p.name.startswith(".")}


def test_a_manifest_says_where_the_layers_are(model: Path) -> None:
    found = make_manifest(model)
    by_name = {file.name: file for file in found.files}
    assert set(by_name) == {"config.json", "tokenizer.json", *SHARDS}
    assert found.layers == LAYERS
    assert by_name["model-1.safetensors"].layers == (0, 1)
    assert by_name["model-1.safetensors"].embedding and not by_name["model-1.safetensors"].head
    assert by_name["model-3.safetensors"].head and not by_name["model-3.safetensors"].embedding


@pytest.mark.parametrize(
    ("first", "layers", "shards"),
    [
        (0, 1, {1}), (0, 2, {1, 2}), (1, 1, {1, 2}), (2, 1, {2}),
        (2, 2, {1, 2, 3}),  # the last stage has the embedding too: its head may be tied to it
        (0, 4, {1, 2, 3}),
    ],
)  # fmt: skip
def test_a_stage_fetches_the_files_of_its_layers(
    store: FolderStore, model: Path, tmp_path: Path, first: int, layers: int, shards: set[int]
) -> None:
    target = tmp_path / "node"
    moved = fetch(store, target, first, layers)
    wanted = {f"model-{n}.safetensors" for n in shards}
    assert names(target) == {"config.json", "tokenizer.json", *wanted}
    assert (
        moved.bytes_moved == moved.bytes == sum((model / n).stat().st_size for n in names(target))
    )
    for name in names(target):
        assert (target / name).read_bytes() == (model / name).read_bytes()
    assert fetch(store, target, first, layers).bytes_moved == 0


def test_what_is_pushed_already_is_not_pushed_again(store: FolderStore, model: Path) -> None:
    assert push(model, store).bytes_moved == 0
    safetensors(model / "model-2.safetensors", ["model.layers.1.b", "model.layers.2.c"])
    moved = push(model, store)
    assert moved.bytes_moved == (model / "model-2.safetensors").stat().st_size


@dataclass
class Flaky:
    """A store whose answers end early, some times."""

    inner: FolderStore
    url: str = "flaky"
    cuts: list[int] = field(default_factory=list)  # bytes of each next answer
    asked: list[int] = field(default_factory=list)  # where each began

    def read(self, name: str, start: int = 0) -> Iterator[bytes]:
        if not name.endswith("safetensors"):
            yield from self.inner.read(name, start)
            return
        self.asked.append(start)
        cut = self.cuts.pop(0) if self.cuts else None
        for piece in self.inner.read(name, start):
            yield piece[:cut]
        if cut is not None:
            raise WeightsError("the line is cut")

    def write(self, name: str, path: Path) -> None:
        raise NotImplementedError

    def size(self, name: str) -> int | None:
        return self.inner.size(name)


def test_a_fetch_goes_on_where_it_was_cut_off(
    store: FolderStore, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "PAUSE_S", 0.0)
    monkeypatch.setattr(moving, "AT_ONCE", 1)
    flaky = Flaky(store, cuts=[1000, 2000])
    fetch(flaky, tmp_path / "node", 2, 1)
    assert flaky.asked == [0, 1000, 3000]
    whole = (model / "model-2.safetensors").read_bytes()
    assert (tmp_path / "node" / "model-2.safetensors").read_bytes() == whole
    for_ever = Flaky(store, cuts=[10] * 99)
    with pytest.raises(WeightsError, match="the line is cut"):
        fetch(for_ever, tmp_path / "other", 2, 1)
    assert "model-2.safetensors" not in names(tmp_path / "other")
    fetch(store, tmp_path / "other", 2, 1)
    assert (tmp_path / "other" / "model-2.safetensors").read_bytes() == whole


def test_weights_that_are_not_what_was_pushed_are_refused(
    store: FolderStore, tmp_path: Path
) -> None:
    path = Path(store.url) / "model-2.safetensors"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(WeightsError, match=r"model-2.safetensors has checksum .* push the model"):
        fetch(store, tmp_path / "node", 2, 1)
    assert "model-2.safetensors" not in names(tmp_path / "node")


def test_what_is_no_model_is_said(tmp_path: Path, model: Path, store: FolderStore) -> None:
    with pytest.raises(WeightsError, match=r"has no config\.json"):
        make_manifest(tmp_path)
    for name in SHARDS:
        (model / name).unlink()
    with pytest.raises(WeightsError, match=r"has no \*.safetensors"):
        make_manifest(model)
    (model / "a.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(WeightsError, match="is no safetensors file, or is cut off"):
        make_manifest(model)
    with pytest.raises(WeightsError, match=r"no model at .*none; push one with"):
        read_manifest(open_store(str(tmp_path / "none")))
    with pytest.raises(WeightsError, match="cannot lie at ftp://x/y"):
        open_store("ftp://x/y")
    with pytest.raises(WeightsError, match="has 4 layers, not 6"):
        fetch(store, tmp_path / "node", 2, 4)
    (Path(store.url) / NAME).write_text("{}")
    with pytest.raises(WeightsError, match="is no manifest of Coral"):
        read_manifest(store)


def test_the_command_fetches_and_becomes_the_engine(store: FolderStore, tmp_path: Path) -> None:
    target = tmp_path / "node"
    engine = [sys.executable, "-c", "import os, sys; print('engine', sys.argv[1:])", "serve"]
    done = subprocess.run(
        [sys.executable, "-m", "coral", "weights", "fetch", store.url, str(target),
         "--first-layer", "2", "--layers", "1", "--", *engine],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "engine ['serve']\n"
    assert names(target) == {"config.json", "tokenizer.json", "model-2.safetensors"}
    bad = subprocess.run(
        [sys.executable, "-m", "coral", "weights", "fetch", str(tmp_path / "no"), str(target)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert bad.returncode == 2
    assert "push one with `coral weights push FOLDER" in bad.stderr


def test_every_stage_of_a_replica_fetches_its_own_layers() -> None:
    stages = tuple(
        Stage(first, count, (StageNode("A x1", 1, 1, 1),)) for first, count in ((0, 3), (3, 1))
    )
    settings = EngineSettings(("vllm",), "/models/m", "m", 64, weights="s3://bucket/m")
    hosts = [Host("a", "10.0.0.1", 7000), Host("b", "10.0.0.2", 7000)]
    placement = Placement(stages, 1, 1, 0.0, 0.0, 0.0)
    first, second = plan_stages("r", Phase.AGGREGATED, placement, hosts, settings).processes
    assert first.prepare[:4] == ("weights", "fetch", "s3://bucket/m", "/models/m/layers-0-2")
    assert second.prepare[4:] == ("--first-layer", "3", "--layers", "1")
    assert "/models/m/layers-3-3" in second.argv

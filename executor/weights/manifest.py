"""What a model consists of: its files, their checksums, and the layers that are in them.

The header of a safetensors file names its tensors (Hugging Face, safetensors format: 8 bytes of
length, then JSON), so nothing of the weights themselves is read to know where a layer is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from planner.errors import InputError

NAME = "coral-manifest.json"
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
FIRST_NAMES = ("embed_tokens", "wte", "embed_in")
CHUNK = 1 << 20
IGNORED = {".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx"}  # the same weights again


class WeightsError(InputError):
    """Weights that are not there, not whole, or not of a kind that can be split."""


class WeightFile(BaseModel):
    """One file of a model."""

    model_config = ConfigDict(frozen=True)

    name: str  # below the model's folder
    size: int  # bytes
    sha256: str
    layers: tuple[int, ...] = ()  # that have tensors in it
    embedding: bool = False
    head: bool = False  # final norm, output projection, and whatever else has no layer
    weights: bool = False


class Manifest(BaseModel):
    """All files of a model."""

    model_config = ConfigDict(frozen=True)

    files: tuple[WeightFile, ...]

    def needed(self, first_layer: int, layers: int, last: bool) -> list[WeightFile]:
        """Files of a stage: settings and tokenizer, its layers, the embedding, the head.

        Tied models read the embedding for their head, so the last stage has it too.
        """
        mine = range(first_layer, first_layer + layers)
        return [
            file
            for file in self.files
            if not file.weights
            or any(layer in mine for layer in file.layers)
            or (file.embedding and (first_layer == 0 or last))
            or (file.head and last)
        ]

    @property
    def layers(self) -> int:
        return 1 + max((layer for file in self.files for layer in file.layers), default=-1)


def parse_manifest(text: str, where: str) -> Manifest:
    """Raises WeightsError: it is none."""
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        raise WeightsError(
            f"{where} is no manifest of Coral ({error.errors()[0]['msg']}); push the model again"
        ) from error


def make_manifest(folder: Path) -> Manifest:
    """Of a model's folder.

    Raises WeightsError: no config.json, no safetensors, or a file that is cut off.
    """
    if not (folder / "config.json").is_file():
        raise WeightsError(f"no model in {folder}: it has no config.json")
    names = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.suffix not in IGNORED
    )
    files = [_file(folder, path) for path in names if path.name != NAME]
    if not any(file.weights for file in files):
        raise WeightsError(f"{folder} has no *.safetensors; convert the model to them first")
    return Manifest(files=tuple(files))


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file(folder: Path, path: Path) -> WeightFile:
    found = WeightFile(
        name=path.relative_to(folder).as_posix(), size=path.stat().st_size, sha256=checksum(path)
    )
    if path.suffix != ".safetensors":
        return found
    tensors = list(_tensors(path))
    layers = {int(match[1]) for name in tensors if (match := LAYER.search(name))}
    others = [name for name in tensors if not LAYER.search(name)]
    first = [name for name in others if any(part in name for part in FIRST_NAMES)]
    return found.model_copy(
        update={
            "layers": tuple(sorted(layers)),
            "embedding": bool(first),
            "head": len(first) < len(others),
            "weights": True,
        }
    )


def _tensors(path: Path) -> Iterable[str]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length < path.stat().st_size:
            raise WeightsError(f"{path} is no safetensors file, or is cut off")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise WeightsError(f"{path} is no safetensors file ({error})") from error
    return [name for name in header if name != "__metadata__"]

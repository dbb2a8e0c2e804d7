"""Files that several processes share: written whole or not at all, read as what they hold."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

Content = TypeVar("Content", bound=BaseModel)


class UnreadableError(ValueError):
    """A file that does not hold what it should; the message is the reason's first line."""


def write_whole(path: Path, text: str) -> None:
    """A reader finds the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


def write_private(path: Path, text: str) -> None:
    """As `write_whole`, for its owner's eyes alone."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    Path(draft).replace(path)


def stamp(path: Path) -> tuple[int, int] | None:
    """Another one whenever the file was written again; None: there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_ino


def write_model(path: Path, content: BaseModel) -> None:
    """As JSON."""
    write_whole(path, content.model_dump_json(indent=1))


def read_model(path: Path, kind: type[Content]) -> Content:
    """What the file holds; an empty `kind` where there is no file.

    Raises UnreadableError.
    """
    try:
        return kind.model_validate_json(path.read_text())
    except FileNotFoundError:
        return kind()
    except (OSError, ValidationError) as error:
        raise UnreadableError(str(error).splitlines()[0]) from error

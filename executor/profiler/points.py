"""The file of raw measurements: kept after every point, so that a run can be taken up again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FORMAT = "coral-measurements-1"
Point = dict[str, Any]
KEY = ("tp", "kind", "batch", "tokens", "context")


class OtherRunError(Exception):
    """The file holds measurements of something else."""


class Measurements:
    """Points of one model on one machine; those in the file are not measured again."""

    def __init__(self, path: Path, header: dict[str, Any], same: tuple[str, ...]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"format": FORMAT, **header, "points": [], "grids": []}
        if path.exists():
            self._take_up(header, same)
        self._by_key = {self._key(point): point for point in self.data["points"]}

    def _take_up(self, header: dict[str, Any], same: tuple[str, ...]) -> None:
        try:
            found = json.loads(self.path.read_text())
        except ValueError as error:
            raise OtherRunError(
                f"{self.path} holds no measurements ({error}); choose another file"
            ) from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise OtherRunError(f"{self.path} holds no measurements; choose another file")
        for name in same:
            if found.get(name) != header[name]:
                raise OtherRunError(
                    f"{self.path} was measured with another {name} ({_short(found.get(name))}, now "
                    f"{_short(header[name])}); choose another file, or remove it"
                )
        self.data = {**found, **{k: v for k, v in header.items() if k not in found}}

    def get(self, **key: Any) -> Point | None:
        """A point that was measured before."""
        return self._by_key.get(self._key(key))

    def add(self, point: Point) -> Point:
        """Keep a point."""
        self.data["points"].append(point)
        self._by_key[self._key(point)] = point
        self.save()
        return point

    def save(self) -> None:
        """Replace the file as a whole."""
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self.data, indent=1))
        draft.replace(self.path)

    @staticmethod
    def _key(point: Point) -> tuple[Any, ...]:
        return tuple(point[name] for name in KEY)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else text[:77] + "..."

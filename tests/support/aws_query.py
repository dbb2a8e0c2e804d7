"""EC2's query protocol, as a server reads it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any


def pages(items: list[Any], token: object, size: int) -> tuple[list[Any], str | None]:
    """One page of items from a token on, and the next token."""
    first = int(str(token)) if token else 0
    page = items[first : first + size]
    return page, str(first + size) if first + size < len(items) else None


def values_of(parameters: Mapping[str, Any], prefix: str) -> list[str]:
    """The list that EC2's query protocol numbers: 'InstanceType.1', 'InstanceType.2'."""
    found = []
    for number in itertools.count(1):
        value = parameters.get(f"{prefix}.{number}")
        if value is None:
            return found
        found.append(str(value))
    return found


def filters_of(parameters: Mapping[str, Any]) -> dict[str, list[str]]:
    """Filters by name."""
    found = {}
    for number in itertools.count(1):
        name = parameters.get(f"Filter.{number}.Name")
        if name is None:
            return found
        found[str(name)] = values_of(parameters, f"Filter.{number}.Value")
    return found

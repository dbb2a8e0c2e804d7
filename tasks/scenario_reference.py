"""The reference of a scenario's keys, made from the models that read it.

    python -m tasks.scenario_reference > docs/scenario.md

What a key means is the comment beside its field; what a group of keys is, its class's docstring.
"""

from __future__ import annotations

import inspect
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from planner.scenario import ScenarioSpec

HEAD = """# Scenario keys

Made from the models that read a scenario (`python -m tasks.scenario_reference > docs/scenario.md`);
a test keeps them equal. Keys that are not here are refused.
[`examples/core.yaml`](../examples/core.yaml) is a commented start.
"""
FIELD = re.compile(r"^\s*(\w+)\s*:")
TYPES = {"str": "text", "float": "number", "int": "whole number", "bool": "true or false"}


def markdown() -> str:
    """The whole page."""
    parts = [HEAD]
    for path, model in _groups("", ScenarioSpec):
        title = f"`{path}`" if path else "The file"
        text = inspect.getdoc(model) or ""
        parts.append(f"## {title}\n\n{_paragraphs(text)}\n")
        rows = ["| key | value | default | |", "| --- | --- | --- | --- |"]
        comments = _comments(model)
        for name, field in model.model_fields.items():
            said = comments.get(name, "")
            rows.append(
                f"| `{name}` | {_kind(field.annotation, field)} | {_default(field)} | {said} |"
            )
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _groups(path: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """A model and those of its fields, depth first, each under the keys that lead to it."""
    yield path, model
    for name, field in model.model_fields.items():
        for inner, many in _models(field.annotation):
            yield from _groups(f"{path}.{name}{many}".lstrip("."), inner)


def _models(kind: Any, many: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _models(get_args(kind)[0], many)
    elif origin in {Union, UnionType}:
        for one in get_args(kind):
            yield from _models(one, many)
    elif origin in {tuple, list}:
        yield from _models(get_args(kind)[0], "[]")
    elif origin in {dict, Mapping} or (isinstance(origin, type) and issubclass(origin, Mapping)):
        yield from _models(get_args(kind)[1], ".NAME")
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind, many


def _kind(kind: Any, field: FieldInfo | None = None) -> str:
    """In words."""
    origin, inner = get_origin(kind), get_args(kind)
    limits = _limits(field.metadata) if field is not None else ""
    if origin is Annotated:
        return _kind(inner[0]) + _limits(inner[1:])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in {Union, UnionType}:
        return " or ".join(_kind(one) for one in inner if one is not type(None)) + limits
    if origin in {tuple, list}:
        return f"list of {_kind(inner[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"{_kind(inner[1])} by name"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{one.value}`" for one in kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "keys below"
    return TYPES.get(getattr(kind, "__name__", ""), "value") + limits


def _limits(metadata: Any) -> str:
    """Bounds as pydantic keeps them."""
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    found = []
    for one in metadata:
        for limit in (one, *getattr(one, "metadata", ())):
            found += [
                f"{word} {getattr(limit, name):g}"
                for name, word in words.items()
                if getattr(limit, name, None) is not None
            ]
    return f", {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, BaseModel) or value in ((), {}, [], ""):
        return ""
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(_plain(one) for one in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """What stands beside the fields of a class and of those that it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not (issubclass(base, BaseModel) and base is not BaseModel):
            continue
        name = None
        for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(base)).readline):
            begun = FIELD.match(token.line) if token.start[1] == 4 else None
            if token.start[1] == 4 and token.type in {tokenize.NAME, tokenize.OP}:
                known = begun and begun.group(1) in model.model_fields
                name = begun.group(1) if begun and known else name if token.string in ")]" else None
            alone = token.line.lstrip().startswith("#")
            if token.type == tokenize.COMMENT and name and not alone:
                found[name] = token.string.lstrip("# ").replace("|", "\\|")
    return found


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


if __name__ == "__main__":
    print(markdown(), end="")

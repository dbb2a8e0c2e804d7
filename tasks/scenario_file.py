"""Read a scenario file written by a person, and say what is wrong with it in one sentence."""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError

from planner.errors import ScenarioError
from planner.scenario import ScenarioSpec


class _NoRepeats(yaml.SafeLoader):
    """YAML lets a repeated key win silently; here it is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is there twice", node.start_mark
                )
        return dict(super().construct_mapping(node, deep))


def read_scenario(name: str) -> ScenarioSpec:
    """Parse a path, or the name of a shipped example such as `core`.

    Raises ScenarioError: no such file, not YAML, unknown or missing keys, values out of range.
    """
    path = find_scenario(name)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_NoRepeats)
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"cannot read scenario file {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    return parse_scenario(content, str(path))


def parse_scenario(content: object, where: str) -> ScenarioSpec:
    """Validate the parsed content of a scenario file."""
    if not isinstance(content, dict):
        raise ScenarioError(f"{where} must be a mapping with keys such as workloads and domains")
    try:
        return ScenarioSpec.model_validate(content)
    except ValidationError as error:
        raise ScenarioError(f"{where}: {first_problem(error)}") from error


def find_scenario(name: str) -> Path:
    """The file itself, or the shipped example of that name."""
    path = Path(name)
    if path.is_file():
        return path
    examples = example_folder()
    shipped = {found.stem: found for found in sorted(examples.glob("*.yaml"))}
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(path.stem, shipped, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"shipped examples: {', '.join(shipped)}"
    raise ScenarioError(f"no scenario file {name!r}; {hint}")


def example_folder() -> Path:
    """Folder of the shipped examples."""
    return Path(str(resources.files("examples")))


def first_problem(error: ValidationError) -> str:
    """What is wrong with a key, and the key that was probably meant."""
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"]) or "the file"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if problem["type"] == "extra_forbidden":
        key = str(problem["loc"][-1])
        near = difflib.get_close_matches(key, _all_keys(ScenarioSpec), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see the comments of examples/core.yaml"
        return f"unknown key {place!r}; {hint}{more}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {message[0].lower()}{message[1:]}, got {problem['input']!r}{more}"


def _all_keys(model: type[BaseModel]) -> list[str]:
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(name)
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                keys += _all_keys(part)
    return keys

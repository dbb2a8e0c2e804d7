"""The picture of the packages is that of the import contracts."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path


def arrows(text: str) -> set[tuple[str, str]]:
    block = re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL)[0]
    return set(re.findall(r"(\w+)(?:\[.*?\])? --> (\w+)", block))


def test_the_picture_matches_the_contracts(repository: Path) -> None:
    found = arrows((repository / "docs" / "architecture.md").read_text())
    config = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["importlinter"]
    packages = set(config["root_packages"])
    assert {name for arrow in found for name in arrow} == packages
    forbidden = set()
    for contract in config["contracts"]:
        if contract["type"] == "forbidden":
            forbidden |= {
                (source, target)
                for source in contract["source_modules"]
                for target in set(contract["forbidden_modules"]) & packages
            }
        if contract["type"] == "independence":
            one, other = contract["modules"]
            forbidden |= {(one, other), (other, one)}
    assert found & forbidden == set()
    # Among the packages below the tasks every import that may be is drawn, but for two that would
    # be new: nothing forbids them, and nothing needs them.
    lower = packages - {"coral", "flows", "tasks"}
    allowed = {(a, b) for a in lower for b in lower if a != b} - forbidden
    unused = {("catalog", "simulator"), ("executor", "simulator")}
    assert {(a, b) for a, b in found if a in lower} == allowed - unused
    layers = next(c["layers"] for c in config["contracts"] if c["type"] == "layers")
    assert all(pair in found for pair in itertools.pairwise(layers))

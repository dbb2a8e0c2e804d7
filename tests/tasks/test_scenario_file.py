"""Reading scenario files: what a user sees when one is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import ScenarioError
from tasks.scenario_file import example_folder, read_scenario


@pytest.mark.parametrize("path", sorted(example_folder().glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_scenario_is_valid_and_named_after_its_file(path: Path) -> None:
    assert read_scenario(str(path)).name == path.stem
    assert read_scenario(path.stem) == read_scenario(str(path))


def test_a_missing_file_suggests_a_shipped_one() -> None:
    with pytest.raises(ScenarioError, match=r"no scenario file 'cor'; did you mean 'core'"):
        read_scenario("cor")
    with pytest.raises(
        ScenarioError,
        match=r"shipped examples: core, ec2, extended, internet, local, small-nodes, suite, tiny",
    ):
        read_scenario("/nowhere/zzz.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not valid YAML"),
        ("- a list", "must be a mapping"),
        ("name: x", "workloads: field required"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=f"{path}.*{message}"):
        read_scenario(str(path))


def test_binary_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(b"\xff\xfe\x00bad")
    with pytest.raises(ScenarioError, match="cannot read scenario file"):
        read_scenario(str(path))

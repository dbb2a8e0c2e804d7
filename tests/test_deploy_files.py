"""Files that start Coral elsewhere name commands, options and users that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from coral.cli import app

BIN = Path(sys.executable).parent
HELP: dict[tuple[str, ...], str] = {}


def help_of(*command: str) -> str:
    if command not in HELP and command[0] == "coral":  # without a process for each
        found = CliRunner().invoke(app, [*command[1:], "--help"])
        assert found.exit_code == 0, found.output
        HELP[command] = found.output
    if command not in HELP:
        done = subprocess.run(
            [BIN / command[0], *command[1:], "--help"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        HELP[command] = done.stdout
    return HELP[command]


def check(line: list[str]) -> None:
    """The program, its verbs and its options are known."""
    program, *rest = [Path(line[0]).name, *line[1:]]
    verbs = verbs_of(rest)
    text = help_of(program, *verbs)
    for option in (word.split("=")[0] for word in rest if word.startswith("--")):
        assert option in text, f"{' '.join(line)}: {option}"


def verbs_of(words: list[str]) -> list[str]:
    """Verbs: the words before the first option or argument."""
    found = []
    for word in words:
        if word.startswith("-") or (not word.isidentifier() and "-" not in word) or ":" in word:
            break
        found.append(word)
    return found


@pytest.fixture(scope="module")
def compose(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((repository / "docs" / "compose.yaml").read_text())
    return found


def test_compose_starts_what_exists(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert {"prefect", "worker", "dask-scheduler", "dask-worker"} <= set(services)
    for name, service in services.items():
        if service["image"] != "coral":
            continue
        entry = service.get("entrypoint", ["coral"])
        if entry[0] == "sh":
            for part in re.split(r"&&|exec", entry[2])[-3:]:
                words = [word for word in shlex.split(part) if "=" not in word or "--" in word]
                check([word for word in words if not word.startswith("PREFECT_")])
        else:
            check([*entry, *service.get("command", [])])
        for other in service.get("depends_on", ()):
            assert other in services, f"{name} waits for {other}"
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in compose["volumes"]


def test_the_image_is_what_compose_runs(repository: Path, compose: dict[str, Any]) -> None:
    text = (repository / "docs" / "Containerfile").read_text()
    extras = re.findall(r"'\.\[(.*?)\]'", text)[0].split(",")
    project = (repository / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in extras)
    (home,) = set(re.findall(r"CORAL_HOME=(\S+)", text))
    volumes = {v.split(":")[1] for s in compose["services"].values() for v in s.get("volumes", ())}
    assert home in volumes


def test_units_start_what_exists(repository: Path) -> None:
    units = sorted((repository / "docs" / "systemd").glob("*.service"))
    assert len(units) == 6
    for unit in units:
        text = unit.read_text()
        (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
        check(shlex.split(command))
        assert "Restart=always" in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_understands_the_units(repository: Path, tmp_path: Path) -> None:
    for unit in (repository / "docs" / "systemd").glob("*.service"):
        text = re.sub(r"/opt/coral/\.venv/bin/\S+", sys.executable, unit.read_text())
        (tmp_path / unit.name).write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", tmp_path / unit.name],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        mine = [line for line in done.stderr.splitlines() if unit.name in line]
        assert mine == []

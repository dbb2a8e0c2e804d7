"""Runs of `coral serve-local`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from .site import coral as command


def coral(home: Path, *arguments: str) -> dict:
    """What a command prints with --json."""
    done = subprocess.run(
        command(*arguments, "--home", str(home), "--json"),
        capture_output=True, text=True, timeout=850, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def serve_local(home: Path, *arguments: str) -> dict:
    return coral(home, "serve-local", "--requests", "32", *arguments)

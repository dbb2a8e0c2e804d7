"""An instance on this machine: the very user data of a launch, run as cloud-init would run it.

Its image has what the user data would install (`bake`), its addresses are loopback ones, and
`shutdown` ends the instance at the local AWS.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

FAKE_ENGINE = Path(__file__).parents[1] / "executor" / "fake_engine.py"
REPOSITORY = Path(__file__).parents[2]


def bake(root: Path, engine: Path | None = None) -> None:
    """An image: agent and engine lie in their places."""
    coral = f'exec {sys.executable} -m coral "$@"'
    vllm = f'exec {engine or f"{sys.executable} {FAKE_ENGINE}"} "$@"'
    python = f'exec {sys.executable} "$@"'
    for place, line in (
        ("agent/bin/coral", coral), ("agent/bin/python", python), ("engine/bin/vllm", vllm),
    ):  # fmt: skip
        program(root / place, line)


def program(path: Path, line: str) -> None:
    """A shell script of one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def place(instance_id: str, region: str, private: str, public: str | None = None) -> None:
    """Give an instance of the local AWS its addresses."""
    from moto.ec2.models import ec2_backends

    backend = ec2_backends["123456789012"][region]
    interface = backend.get_instance(instance_id).nics[0]
    interface.private_ip_address = private
    interface.public_ip = public


def user_data_of(instance_id: str, region: str) -> str:
    """As the instance would read it."""
    ec2 = boto3.client("ec2", region_name=region)
    found = ec2.describe_instance_attribute(InstanceId=instance_id, Attribute="userData")
    return base64.b64decode(found["UserData"]["Value"]).decode()


@dataclass
class StubNode:
    """One instance that came to life; end it."""

    instance_id: str
    process: subprocess.Popen[bytes]

    @classmethod
    def boot(cls, instance_id: str, region: str, folder: Path, **changes: str) -> StubNode:
        """Run its user data."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "user-data").write_text(user_data_of(instance_id, region))
        ends = (
            f'{sys.executable} -c \'import boto3; boto3.client("ec2", region_name="{region}")'
            f'.terminate_instances(InstanceIds=["{instance_id}"])\''
        )
        program(folder / "bin" / "shutdown", ends)
        environment = {
            **os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY), **changes,
        }  # fmt: skip
        with (folder / "console").open("wb") as console:
            process = subprocess.Popen(
                ["sh", str(folder / "user-data")], env=environment, stdin=subprocess.DEVNULL,
                stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip
        return cls(instance_id, process)

    def end(self) -> None:
        """Like a power cut."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def terminate_all(*regions: str) -> None:
    """moto's instances outlive its server."""
    for name in regions:
        ec2: Any = boto3.client("ec2", region_name=name)
        rows = ec2.describe_instances()["Reservations"]
        mine = [one["InstanceId"] for row in rows for one in row["Instances"]]
        if mine:
            ec2.terminate_instances(InstanceIds=mine)

"""How an instance comes to life: the script that cloud-init runs at its first boot.

It installs what the image does not have, then runs the agent, and ends the instance when that ends,
however it does. There is no key and no password in it: whoever may read it (an account's EC2
readers, every process on the node) learns nothing that lets another machine in.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from executor.control.notices import EC2_METADATA
from planner.errors import InputError

LARGEST_BYTES = 16 * 1024  # of EC2
DISTRIBUTION = "coral-serving"
# What the agent and `coral weights fetch` import; the rest of Coral stays on the controller.
NEEDS = (
    "boto3", "filelock", "httpx", "platformdirs", "psutil", "pydantic", "pyzmq", "rich", "typer",
)  # fmt: skip
SCRIPT = """#!/bin/sh
# One node of a Coral fleet comes to life. There is no key in here: the node makes its own, and the
# ticket is worth something once, to the instance of this lease.
set -eu
began=$(date +%s)
root={root}
mkdir -p "$root"
exec >>"$root/node.log" 2>&1
trap 'shutdown -h now' EXIT  # its end ends the instance

environment() {{  # name, program, packages: unless the image has it
    [ -x "$root/$1/bin/$2" ] && return
    name=$1; shift 2
    python3 -m venv "$root/$name" || {{
        apt-get update -q && apt-get install -q -y python3-venv
        python3 -m venv "$root/$name"
    }}
    "$root/$name/bin/python" -m pip install --quiet --retries 10 "$@"
}}
environment agent coral {needs}
[ -x "$root/agent/bin/coral" ] ||
    "$root/agent/bin/python" -m pip install --quiet --retries 10 --no-deps {coral}
environment engine vllm {engine}
{pipelines}installed=$(date +%s)

"$root/agent/bin/coral" agent {options} --began "$began" --installed "$installed"
"""
PIPELINES = "pipelines"  # under the root: what the engine's PYTHONPATH has
LINK = """# Coral's pipelines for vLLM come with the agent's Coral, in its version.
[ -e "$root/{name}" ] || ln -sfn "$("$root/agent/bin/python" -I -c \\
    'from executor.vllm.environment import PIPELINES; print(PIPELINES)')" "$root/{name}"
""".replace("{name}", PIPELINES)


class UserDataError(InputError):
    """A script that EC2 would not take."""


@dataclass(frozen=True, slots=True)
class NodeBoot:
    """What one node is told."""

    lease_id: str
    controller: str  # 'tcp://10.0.0.1:7000'
    enrol: str  # where it asks to be let in
    controller_key: str  # public
    ticket: str
    root: str  # folder of everything of Coral's on the node
    coral: Sequence[str]  # what pip installs, without what it needs
    engine: Sequence[str]
    metadata: str = EC2_METADATA
    pipelines: bool = False  # whether its engines run Coral's


def user_data(boot: NodeBoot) -> str:
    """The script.

    Raises UserDataError: too long.
    """
    options = {
        "lease": boot.lease_id, "controller": boot.controller,
        "controller-key": boot.controller_key, "enrol": boot.enrol, "ticket": boot.ticket,
        "key-file": f"{boot.root}/{boot.lease_id}.key", "folder": f"{boot.root}/logs",
        "metadata": boot.metadata, "first-lease": "300",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    text = SCRIPT.format(
        root=shlex.quote(boot.root), needs=shlex.join(agent_needs()), coral=shlex.join(boot.coral),
        engine=shlex.join(boot.engine), options=shlex.join(words),
        pipelines=LINK if boot.pipelines else "",
    )  # fmt: skip
    if len(text.encode()) > LARGEST_BYTES:
        raise UserDataError(
            f"the user data of a node is {len(text.encode())} bytes, EC2 takes {LARGEST_BYTES}; "
            "shorten fleet.aws.install and fleet.aws.engine"
        )
    return text


@cache
def agent_needs() -> tuple[str, ...]:
    """What the agent runs with, in the versions that this process has."""
    return tuple(f"{name}=={metadata.version(name)}" for name in NEEDS)


@cache
def this_coral() -> str:
    """As pip names it."""
    return f"{DISTRIBUTION}=={metadata.version(DISTRIBUTION)}"

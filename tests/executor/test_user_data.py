"""What an instance runs at its first boot: no secret, pinned packages, an end of its own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from executor.aws.user_data import NEEDS, NodeBoot, UserDataError, agent_needs, user_data
from tests.support.stub_node import program

BOOT = NodeBoot(
    lease_id="a1", controller="tcp://10.0.0.1:7000", enrol="tcp://10.0.0.1:7001",
    controller_key="(it's public) $x", ticket="00ff", root="/opt/coral",
    coral=("coral-serving==0.1.0",), engine=("vllm==0.32.0", "nixl==1.5.1"),
)  # fmt: skip


def test_agent_and_engine_are_pinned() -> None:
    text = user_data(BOOT)
    assert "vllm==0.32.0 nixl==1.5.1" in text
    assert all(f" {one}" in text for one in agent_needs())
    assert len(agent_needs()) == len(NEEDS)
    assert "pipelines" not in text and "pipelines" in user_data(replace(BOOT, pipelines=True))
    with pytest.raises(UserDataError, match="EC2 takes 16384; shorten"):
        user_data(replace(BOOT, engine=("x" * 17_000,)))


def test_what_the_agent_runs_with_is_all_that_it_imports() -> None:
    code = (
        "import sys\n"
        "class No:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in 'prefect duckdb dask polars numpy pulp scipy numba '\\\n"
        "                                 'matplotlib yaml jinja2'.split():\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, No())\n"
        "sys.argv = ['coral', 'agent', '--lease', 'a', '--controller', 'tcp://127.0.0.1:9',\n"
        "            '--controller-key', '(', '--key-file', 'none', '--folder', '.']\n"
        "from coral.cli import main\n"
        "import executor.control.join, executor.weights.store\n"
        "from coral.weights import weights_fetch\n"
        "try:\n"
        "    weights_fetch(sys.argv[0], sys.argv[0])\n"
        "except Exception as error:\n"
        "    print(type(error).__name__)\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.strip() == "WeightsError"  # it got as far as looking for the model
    assert "none is not a key file of Coral" in done.stderr


def wheel(
    folder: Path, name: str, version: str, command: str = "", more: Mapping[str, str] | None = None
) -> None:
    """A package whose command writes down its words."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}.py": (
            "import pathlib, sys\n"
            "def main():\n"
            "    out = pathlib.Path(sys.prefix).parent / (sys.argv[1] + '.words')\n"
            "    out.write_text(chr(10).join(sys.argv[2:]))\n"
        ),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
        **(more or {}),
    }
    if command:
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{command} = {module}:main\n"
    place = folder / name
    place.mkdir(parents=True)
    with zipfile.ZipFile(place / f"{module}-{version}-py3-none-any.whl", "w") as made:
        for file, text in files.items():
            made.writestr(file, text)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """A package index of this machine."""
    folder = tmp_path / "index"
    for need in agent_needs():
        wheel(folder, *need.split("=="))
    parts = {"executor/__init__.py": "", "executor/vllm/__init__.py": ""}
    parts["executor/vllm/environment.py"] = "PIPELINES = '/where/pipelines/are'"
    wheel(folder, "coral-serving", "0.1.0", "coral", parts)
    wheel(folder, "vllm", "0.32.0", "vllm")
    wheel(folder, "nixl", "1.5.1")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def boot(folder: Path, text: str, index: str) -> str:
    """Run the script as cloud-init would; what `shutdown` was asked."""
    program(folder / "bin" / "shutdown", f'echo "$@" > {folder}/shutdown')
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PIP_INDEX_URL": index,
        "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "0",
    }  # fmt: skip
    (folder / "user-data").write_text(text)
    subprocess.run(["sh", folder / "user-data"], env=environment, check=False, timeout=120)
    return (folder / "shutdown").read_text().strip()


def test_what_an_image_lacks_is_installed_and_the_agents_end_ends_the_instance(
    tmp_path: Path, index: str
) -> None:
    python = f"{sys.base_prefix}/bin/python3"  # whose pip new environments share: sooner
    quick = f'exec {python} -m venv --without-pip --system-site-packages "$3"'
    program(tmp_path / "bin" / "python3", quick)
    text = user_data(replace(BOOT, root=str(tmp_path / "opt"), pipelines=True))
    assert boot(tmp_path, text, index) == "-h now"
    assert (tmp_path / "opt" / "pipelines").readlink() == Path("/where/pipelines/are")
    words = (tmp_path / "opt" / "agent.words").read_text().splitlines()
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--controller-key"] == BOOT.controller_key
    assert (given["--enrol"], given["--ticket"]) == (BOOT.enrol, "00ff")
    assert 0.0 <= float(given["--installed"]) - float(given["--began"]) < 120.0
    assert (tmp_path / "opt" / "engine" / "bin" / "vllm").exists()
    agent = next((tmp_path / "opt" / "agent" / "lib").glob("*/site-packages"))
    assert {f"{n.replace('-', '_')}.py" for n in NEEDS} <= {path.name for path in agent.iterdir()}
    assert not list(agent.glob("vllm*"))  # each has an environment of its own


def test_an_install_that_fails_ends_the_instance(tmp_path: Path) -> None:
    for name in ("python3", "apt-get"):
        program(tmp_path / "bin" / name, f"echo no {name} today; exit 1")
    text = user_data(replace(BOOT, root=str(tmp_path / "opt")))
    assert boot(tmp_path, text, "http://127.0.0.1:9") == "-h now"
    said = (tmp_path / "opt" / "node.log").read_text().splitlines()
    assert said == ["no python3 today", "no apt-get today", "no python3 today"]

"""Run executor/profiler in the environment that has torch or vLLM: here, or on Dask workers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distributed

import executor.profiler
from planner.errors import CoralError, InputError
from planner.shapes import ARCHITECTURES, DTYPE_BYTES, model_from_config
from tasks.coral_task import coral_task
from tasks.profile_file import read_measurements
from tasks.progress import report
from tasks.solving import SchedulerMismatchError, SchedulerUnreachableError

START = Path(executor.profiler.__file__).with_name("start.py")
SOURCES = START.parents[2]
REFUSED = 2  # exit code of the profiler
ENVIRONMENTS = (".venv-vllm/bin/python",)
ASK_TIMEOUT_S = 120.0
REACH_SCHEDULER_S = 10.0


class ProfilerError(CoralError):
    """The measurement failed."""


class ProfilerRefusedError(InputError):
    """The machine, or what was asked for, does not allow it."""


@dataclass(frozen=True)
class ProfileRequest:
    """What to measure."""

    config: dict[str, Any]
    name: str
    python: str | None = None
    device: str = "auto"
    backend: str = "auto"
    dtype: str = "auto"
    minutes: float = 10.0
    tp: tuple[int, ...] = ()
    cores: tuple[str, ...] = ("0",)
    depths: tuple[int, int] = (1, 3)
    serving: bool = True
    force: bool = False
    limits: tuple[tuple[str, int], ...] = ()  # --max-batch and the like
    serve_only: tuple[tuple[int, int, int], ...] = ()  # in flight, prompt, output; nothing else

    def arguments(self) -> list[str]:
        """Of the profiler, model and file apart."""
        found = [
            "--device", self.device, "--backend", self.backend, "--dtype", self.dtype,
            "--minutes", f"{self.minutes:g}", "--depths", *(str(d) for d in self.depths),
            "--cores", *self.cores,
        ]  # fmt: skip
        found += ["--tp", *(str(size) for size in self.tp)] if self.tp else []
        found += [] if self.serving else ["--no-serving"]
        found += ["--force"] if self.force else []
        if self.serve_only:
            found += ["--serve-only", *(",".join(map(str, point)) for point in self.serve_only)]
        for name, value in self.limits:
            found += [f"--max-{name}", str(value)]
        return found


def read_model(path: Path, name: str | None) -> tuple[dict[str, Any], str]:
    """The config.json of a folder or file, and the model's name.

    Raises ProfilerRefusedError; ModelConfigError: an architecture without shapes.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ProfilerRefusedError(
            f"no model at {path}: {file} cannot be read ({error.strerror})"
        ) from error
    except ValueError as error:
        raise ProfilerRefusedError(f"{file} is no config.json ({error})") from error
    if not isinstance(config, dict):
        raise ProfilerRefusedError(f"{file} is no config.json (supported: {ARCHITECTURES})")
    found = name or config.get("_name_or_path") or file.resolve().parent.name
    model_from_config(found, config, "bfloat16")  # refuses what has no shapes
    return config, str(found)


def check_request(request: ProfileRequest, here: bool) -> None:
    """Find a mistake before a flow starts.

    Raises ProfilerRefusedError.
    """
    for what, value, options in (
        ("device", request.device, ("auto", "cuda", "cpu")),
        ("backend", request.backend, ("auto", "vllm", "torch")),
        ("dtype", request.dtype, ("auto", *DTYPE_BYTES)),
    ):
        if value not in options:
            raise ProfilerRefusedError(f"unknown {what} {value!r}: {', '.join(options)}")
    for size in request.tp:
        if request.device == "cpu" and size > len(request.cores):
            raise ProfilerRefusedError(
                f"tensor parallel size {size} needs {size} core groups (--cores), there are "
                f"{len(request.cores)}"
            )
    if here:
        require_torch(request.python)


def require_torch(python: str | None) -> Path:
    """The interpreter to measure with.

    Raises ProfilerRefusedError: it has no torch.
    """
    names = [python] if python else [*ENVIRONMENTS, sys.executable]
    places = [place for name in names for place in (Path(name).expanduser(), SOURCES / name)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ProfilerRefusedError(f"no interpreter at {python}; name one that has torch")
    asked = subprocess.run(
        [found, "-c", "import importlib.util as u; print(u.find_spec('torch') is not None)"],
        capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False,
    )  # fmt: skip
    if asked.stdout.strip() != "True":
        raise ProfilerRefusedError(
            f"no torch in the environment of {found}; install coral-serving[profile] there, or "
            "name another interpreter with --python"
        )
    return found.absolute()


def run_profiler(request: ProfileRequest, out: Path) -> Path:
    """Measure into `out`; points that are there already are kept.

    Raises ProfilerError or ProfilerRefusedError with the profiler's own sentence.
    """
    python = require_torch(request.python)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(request.config))
        errors = Path(folder) / "errors"
        command = [str(python), str(START), folder, str(out.absolute()), *request.arguments()]
        with errors.open("w") as file:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True
            )
            try:
                _follow(process, request.name)
                code = process.wait()
            finally:
                _end(process)
        said = [line for line in errors.read_text().splitlines() if line.strip()]
    if code == 0:
        return out
    sentence = said[-1] if said else f"exit code {code}"
    if code == REFUSED:
        raise ProfilerRefusedError(sentence)
    raise ProfilerError(f"measuring {request.name} failed: {sentence} ({out.with_suffix('.log')})")


def measured_before(request: ProfileRequest, out: Path) -> bool:
    """Whether `out` has all of it, so that no engine needs to start."""
    if not out.exists():
        return False
    found = read_measurements(out)
    return found.complete and (found.config, found.dtype) == (request.config, request.dtype)


def profile_on_workers(address: str, request: ProfileRequest, folder: Path) -> list[Path]:
    """Measure once on every host whose Dask workers have a GPU (`--resources "GPU=1"`)."""
    logging.getLogger("distributed").setLevel(logging.ERROR)
    try:
        client = distributed.Client(address, timeout=REACH_SCHEDULER_S)
    except (OSError, TimeoutError, ValueError) as error:
        raise SchedulerUnreachableError(
            f"no Dask scheduler answers at {address}; start one with `dask scheduler`"
        ) from error
    with client:
        workers = one_worker_per_host(client.scheduler_info(n_workers=-1)["workers"])
        if not workers:
            raise SchedulerMismatchError(
                f"no worker of {address} has a GPU to measure; start one per GPU host with "
                f'`dask worker {address} --resources "GPU=1"`'
            )
        futures = {
            worker: client.submit(
                measure_there, request, workers=[worker], resources={"GPU": 1}, pure=False
            )
            for worker in workers
        }
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for number, (worker, future) in enumerate(futures.items(), start=1):
            report(f"measure {request.name} on {len(workers)} hosts", number - 1, len(workers))
            text = future.result()
            host = worker.rsplit("/", 1)[-1].rsplit(":", 1)[0].replace(":", "-")
            path = folder / f"{safe(request.name)}-{host}.json"
            path.write_text(text)
            found.append(path)
        report(f"measure {request.name} on {len(workers)} hosts", len(workers), len(workers))
    return found


def one_worker_per_host(workers: dict[str, Any]) -> list[str]:
    """Addresses of workers that have a GPU, the first of each host."""
    chosen: dict[str, str] = {}
    for address, facts in sorted(workers.items()):
        if facts.get("resources", {}).get("GPU", 0) >= 1:
            chosen.setdefault(facts["host"], address)
    return list(chosen.values())


def measure_there(request: ProfileRequest) -> str:
    """On a worker: the raw points as text."""
    with tempfile.TemporaryDirectory() as folder:
        out = run_profiler(request, Path(folder) / "points.json")
        return out.read_text()


def safe(name: str) -> str:
    """A name as part of a file's."""
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in name)


def _follow(process: subprocess.Popen[str], name: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = json.loads(line)
            total = int(said["total"])
            report(f"measure {name} (s)", min(int(said["done"]), total), total)
            logging.getLogger("coral.profile").info("%s", said["what"])


def _end(process: subprocess.Popen[str]) -> None:
    """Also after an interruption; its engines end with it."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


run_profiler_task = coral_task("measure", run_profiler)
profile_on_workers_task = coral_task("measure-on-workers", profile_on_workers)

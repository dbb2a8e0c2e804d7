"""A controller and a gateway for as long as a block runs, and replicas that answer."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from executor.deployment import read_deployment
from executor.home import HomeFiles
from executor.local import LocalFleet
from executor.processes import die_with_parent
from executor.routes import read_routes
from planner.errors import CoralError, InputError
from tasks.coral_task import coral_task
from tasks.fleet_view import end_fleet
from tasks.progress import report

UP_S = 30.0  # for the controller and the gateway
END_S = 20.0
HOST = "127.0.0.1"


class NotServingError(CoralError):
    """Something that should serve does not."""


class SiteBusyError(InputError):
    """A controller is at work on the home already."""


@dataclass(frozen=True, slots=True)
class Site:
    """A home that serves."""

    home: Path
    url: str  # of its gateway


@contextlib.contextmanager
def serving(home: Path, scenario: str, port: int | None = None) -> Iterator[Site]:
    """Start a controller and a gateway; at the end, however it comes, end the scenario's nodes too.

    Raises SiteBusyError, NotServingError.
    """
    if LocalFleet(home).controller() is not None:
        raise SiteBusyError(
            f"a controller is at work on {home} already; end it, or choose another --home"
        )
    port = port or _free_port()
    started = []
    try:
        started.append(_start(home, "controller", []))
        started.append(_start(home, "gateway", ["--port", str(port)]))
        _wait_up(home, port, started)
        yield Site(home, f"http://{HOST}:{port}")
    finally:
        if started:
            end_fleet(str(home), scenario)
        for process in reversed(started):
            _end(process)


def wait_routed(site: Site, patience_s: float) -> int:
    """Until every replica of the deployment is routed to; how many there are.

    Raises NotServingError: one does not answer in time; the logs are named.
    """
    files, began = HomeFiles(site.home), time.monotonic()
    wanted = {replica.id for replica in read_deployment(files.deployment).replicas}
    while True:
        routed = wanted & {route.replica_id for route in read_routes(files.routes).routes}
        report("replicas that answer", len(routed), len(wanted))
        if routed == wanted:
            time.sleep(1.0)  # gateways read routes twice a second
            return len(wanted)
        if time.monotonic() - began > patience_s:
            raise NotServingError(
                f"{len(wanted - routed)} of {len(wanted)} replicas do not answer after "
                f"{patience_s:.0f} s; their logs are in {site.home / 'agents'}"
            )
        time.sleep(0.5)


wait_routed_task = coral_task("wait-until-routed", wait_routed)


def _start(home: Path, verb: str, options: list[str]) -> subprocess.Popen[bytes]:
    folder = home / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "coral", verb, "--home", str(home), *options]
    with (folder / f"{verb}.log").open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent
        )


def _wait_up(home: Path, port: int, started: list[subprocess.Popen[bytes]]) -> None:
    ends = time.monotonic() + UP_S
    while time.monotonic() < ends:
        for process, verb in zip(started, ("controller", "gateway"), strict=True):
            if process.poll() is not None:
                text = (home / "logs" / f"{verb}.log").read_text(errors="replace").strip()
                said = text.splitlines()[-1].removeprefix("coral: ") if text else "no word"
                raise NotServingError(f"the {verb} ended at once: {said}")
        if LocalFleet(home).controller() is not None and _answers(port):
            return
        time.sleep(0.2)
    raise NotServingError(f"controller or gateway not up after {UP_S:.0f} s; see {home / 'logs'}")


def _answers(port: int) -> bool:
    try:
        found = httpx.get(f"http://{HOST}:{port}/health", timeout=1.0, trust_env=False)
    except httpx.HTTPError:
        return False
    return found.status_code == httpx.codes.OK


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])

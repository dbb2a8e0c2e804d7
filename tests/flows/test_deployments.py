"""Deployments at a real Prefect server, run by a real worker."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from catalog.store import Catalog
from tasks.events import FLEET_LOSS
from tasks.operating import lease_store
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(400)
PREFECT = Path(sys.executable).with_name("prefect")
CORAL = Path(sys.executable).with_name("coral")
RUNS_EVERYWHERE = {"operate", "refresh-market", "evaluate"}
AGAIN = Retrying(
    stop=stop_after_delay(60),
    wait=wait_fixed(1),
    retry=retry_if_result(lambda answer: answer.status_code == 503),
)


@contextmanager
def running(command: list[str | Path], environment: dict[str, str], log: Path) -> Iterator[None]:
    with (
        log.open("w") as out,
        subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            yield
        finally:
            os.killpg(process.pid, 15)
            process.wait(30)


def wait_for(what: Callable[[], Any], seconds: float, log: Path) -> Any:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            if (found := what()) is not None:
                return found
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    pytest.fail(f"not within {seconds:g} s: {log.read_text()[-3000:]}")


class Webhook(http.server.BaseHTTPRequestHandler):
    told: list[str]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.told.append(body["text"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def webhook() -> Iterator[tuple[str, list[str]]]:
    """A server for alerts: its address, and what it was told."""
    told: list[str] = []
    server = http.server.HTTPServer(("127.0.0.1", 0), type("Told", (Webhook,), {"told": told}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", told
    finally:
        server.shutdown()


def readme_commands(repository: Path) -> list[str]:
    """From a fresh clone to a deployment that runs."""
    text = (repository / "README.md").read_text()
    part = text[text.index("## On a schedule") :]
    lines = part[part.index("\n    make run") :].split("\n\n")[0].strip().splitlines()
    return [line.strip() for line in lines]


def test_deployments_run(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}/api")
    monkeypatch.setenv("CORAL_HOME", str(tmp_path / "home"))
    environment = os.environ | {"PATH": f"{PREFECT.parent}:{os.environ['PATH']}"}
    commands = readme_commands(repository)
    assert len(commands) == 6
    assert commands[:2] == ["make run", ". .venv/bin/activate"]
    start_server, _, deploy, start_worker = commands[2:]
    assert start_server == "prefect server start --background"
    home, log = tmp_path / "home", tmp_path / "server.log"

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=repository, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    server: list[str | Path] = [PREFECT, "server", "start", "--port", str(port)]
    api = httpx.Client(base_url=f"http://127.0.0.1:{port}/api", timeout=30)

    def ask(path: str, **body: object) -> Any:
        # A server on a busy machine says 503 of its SQLite; Prefect's own client asks again.
        return AGAIN(api.post, path, json=body).raise_for_status().json()

    with running(server, environment, log), webhook() as (url, told):
        wait_for(lambda: api.get("/health").is_success or None, 120, log)
        run(CORAL, "library", "build", "--scenario", "tiny", "--home", home, "--workers", "0")
        run("bash", "-ec", deploy)
        assert "Coral: run failed" in run(CORAL, "alerts", "--notify", url)
        run(CORAL, "alerts")  # again changes nothing, whom they tell included
        names = [one["name"] for one in ask("/automations/filter")]
        assert len(names) == len(set(names)) == 8  # six automations, two triggers of deployments
        deployments = {one["name"]: one for one in ask("/deployments/filter")}
        scheduled = {
            n for n, one in deployments.items() if any(s["active"] for s in one["schedules"])
        }
        assert scheduled == RUNS_EVERYWHERE
        for name, one in deployments.items():
            ask(f"/deployments/{one['id']}/pause_deployment")
            for parameter, said in one["parameter_openapi_schema"]["properties"].items():
                assert said.get("description"), f"{name}: no help for {parameter}"
        at = datetime.now(UTC).isoformat()

        def start(parameters: dict[str, object]) -> str:
            state = {"type": "SCHEDULED", "state_details": {"scheduled_time": at}}
            path = f"/deployments/{deployments['operate']['id']}/create_flow_run"
            return str(ask(path, parameters=parameters, state=state)["id"])

        def ended(run_id: str) -> str | None:
            state = api.get(f"/flow_runs/{run_id}").json()["state"]
            return state["name"] if state["type"] in {"COMPLETED", "FAILED", "CRASHED"} else None

        worker: list[str | Path] = ["bash", "-c", f"exec {start_worker}"]
        with running(worker, environment, tmp_path / "worker.log"):
            run_id = start({"scenario": "tiny", "home": str(home)})
            said = wait_for(lambda: ended(run_id), 150, tmp_path / "worker.log")
            assert said == "Completed", (tmp_path / "worker.log").read_text()[-3000:]
            broken = start({"scenario": "tinny", "home": str(home)})
            wait_for(lambda: ended(broken), 60, tmp_path / "worker.log")
            wait_for(lambda: any("run failed" in text for text in told) or None, 60, log)
            # A node is lost: a round begins by itself, of the scenario that lost it.
            event = {
                "event": FLEET_LOSS, "resource": {"prefect.resource.id": "coral.scenario.tiny"},
                "payload": {"scenario": "tiny", "what": "a node is lost"}, "id": str(uuid4()),
                "occurred": datetime.now(UTC).isoformat(),
            }  # fmt: skip
            api.post("/events", json=[event]).raise_for_status()

            def begun() -> str | None:
                found = ask("/flow_runs/filter", sort="EXPECTED_START_TIME_DESC", limit=10)
                mine = [one for one in found if one["id"] not in {run_id, broken}]
                told_of = [one for one in mine if one["parameters"].get("scenario") == "tiny"]
                return told_of[0]["id"] if told_of else None

            by_itself = wait_for(begun, 60, log)
            assert wait_for(lambda: ended(by_itself), 90, log) == "Completed"
    leases = lease_store(Catalog(home)).all()
    assert leases
    assert all(lease.scenario == "tiny" for lease in leases)

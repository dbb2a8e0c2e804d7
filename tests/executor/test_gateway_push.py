"""Routes pushed to gateways, several of them side by side, and how one leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path

import httpx
import polars as pl
import pytest

from executor.control.controller import Controller
from executor.control.gateways import LOST_AFTER_S, Gateways
from executor.control.keys import load_or_make
from executor.control.messages import WireError, decode
from executor.gateway.app import Limits, make_app
from executor.gateway.door import Door
from executor.gateway.keys import add_key
from executor.home import HomeFiles
from executor.routes import Route, Routes, read_routes, write_routes
from planner.types import Phase
from tests.support.gateway import Engine, ask, served, wait_for
from tests.support.ports import free_port


class Pusher:
    """A controller of a home, at work in a thread, that pushes the routes it is given."""

    def __init__(self, home: Path) -> None:
        files = HomeFiles(home)
        keys = files.controller_keys()
        self.controller = Controller(keys)
        self.controller.admit_gateways(load_or_make(files.gateway_key).public)
        content = {"address": self.controller.address, "public_key": keys.public}
        files.controller.write_text(json.dumps(content))
        self._todo: list[Routes] = []
        self._ended = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def push(self, *routes: Route) -> None:
        """These from now on; it returns when gateways were told."""
        self._todo.append(Routes(models=("org/m",), routes=routes))
        while self._todo:
            time.sleep(0.005)

    def end(self) -> None:
        self._ended = True
        self._thread.join()

    def _run(self) -> None:
        while not self._ended:
            for routes in self._todo[:1]:
                self.controller.gateways.publish(routes.model_dump(mode="json"))
                self._todo.pop()
            self.controller.step(0.02)
        self.controller.close()


@contextmanager
def pushing(home: Path) -> Iterator[Pusher]:
    pusher = Pusher(home)
    try:
        yield pusher
    finally:
        pusher.end()


def route(name: str, url: str, weight: float = 1.0) -> Route:
    return Route(
        replica_id=name, model="org/m", phase=Phase.AGGREGATED, urls=(url,), weight=weight,
        template_id=f"template of {name}",
    )  # fmt: skip


def test_routes_are_pushed_and_the_file_counts_when_nobody_pushes(tmp_path: Path) -> None:
    one, two = Engine(), Engine()
    file = HomeFiles(tmp_path).routes
    with ExitStack() as stack:
        urls = [stack.enter_context(served(engine.app())) for engine in (one, two)]
        base = stack.enter_context(served(make_app(tmp_path)))
        client = stack.enter_context(httpx.Client(base_url=base, timeout=20))
        assert client.get("/health").status_code == 200
        assert client.get("/ready").json() == {"status": "no routes yet"}
        write_routes(file, Routes(models=("org/m",), routes=(route("r1", urls[0]),)))
        assert wait_for(lambda: client.get("/ready").status_code == 200)
        assert ask(client).status_code == 200 and len(one.seen) == 1
        with pushing(tmp_path) as pusher:
            assert wait_for(lambda: pusher.controller.gateways.count == 1)
            pusher.push(route("r2", urls[1]))
            assert wait_for(lambda: pusher.controller.gateways.have_all)
            ask(client)
            assert (len(one.seen), len(two.seen)) == (1, 1)
            write_routes(file, read_routes(file))  # an older word than the controller's
            time.sleep(0.6)
            began = time.monotonic()
            pusher.push(route("r1", urls[0]))  # at once, not when a file is looked at
            assert wait_for(lambda: pusher.controller.gateways.have_all)
            assert time.monotonic() - began < 0.5
            ask(client)
            assert (len(one.seen), len(two.seen)) == (2, 1)
        ask(client)  # the controller is gone: routes known stay
        assert (len(one.seen), len(two.seen)) == (3, 1)
        write_routes(file, Routes(models=("org/m",), routes=(route("r2", urls[1]),)))

        def falls_back() -> bool:
            ask(client)
            return len(two.seen) > 1

        assert wait_for(falls_back, 8.0)


def test_only_the_homes_gateways_are_told(tmp_path: Path) -> None:
    with pushing(tmp_path) as pusher, ExitStack() as stack:
        elsewhere = tmp_path / "elsewhere"
        files = HomeFiles(elsewhere)
        load_or_make(files.gateway_key)  # a key of its own making
        files.controller.write_text(HomeFiles(tmp_path).controller.read_text())
        base = stack.enter_context(served(make_app(elsewhere)))
        pusher.push(route("r1", "http://127.0.0.1:1"))
        time.sleep(1.5)
        assert pusher.controller.gateways.count == 0
        assert httpx.get(f"{base}/ready").status_code == 503
        # The two files copied are all that a gateway on another machine needs.
        files.gateway_key.write_text(HomeFiles(tmp_path).gateway_key.read_text())
        assert wait_for(lambda: httpx.get(f"{base}/ready").status_code == 200, 8.0)


def test_the_controller_knows_who_has_what() -> None:
    sent: list[tuple[bytes, dict]] = []
    now = [0.0]
    gateways = Gateways(lambda to, data: sent.append((to, dict(decode(data)))), lambda: now[0])
    assert (gateways.count, gateways.have_all) == (0, True)
    gateways.hear(b"1", {"gateway": "a", "has": ""})
    assert sent.pop()[1]["routes"] is None  # none are known yet
    gateways.publish({"models": ["m"]})
    to, told = sent.pop()
    assert (to, told["routes"], told["gateways"]) == (b"1", {"models": ["m"]}, 1)
    assert not gateways.have_all
    gateways.hear(b"1", {"gateway": "a", "has": ""})  # the message was lost: again
    assert sent.pop()[1]["routes"] == {"models": ["m"]}
    gateways.hear(b"1", {"gateway": "a", "has": told["mark"]})
    assert sent.pop()[1]["routes"] is None and gateways.have_all
    now[0] = 1.0
    gateways.hear(b"2", {"gateway": "b", "has": told["mark"]})
    assert sent.pop()[1]["gateways"] == 2
    gateways.publish({"models": []})
    assert not gateways.have_all
    gateways.hear(b"2", {"gateway": "b", "has": sent[-1][1]["mark"]})
    now[0] = LOST_AFTER_S + 0.5  # a is silent since
    assert (gateways.count, gateways.have_all) == (1, True)
    for wrong in ({"gateway": "c"}, {"gateway": 1, "has": ""}, {"has": ""}):
        with pytest.raises(WireError):
            gateways.hear(b"3", wrong)


def test_gateways_side_by_side_share_limits_and_their_demand_adds_up(tmp_path: Path) -> None:
    engines = [Engine(), Engine()]
    _, secret = add_key(HomeFiles(tmp_path).gateway_keys, "one", per_minute=40)
    now = [1.8e9]
    with ExitStack() as stack:
        pusher = stack.enter_context(pushing(tmp_path))
        urls = [stack.enter_context(served(engine.app())) for engine in engines]
        pusher.push(route("r0", urls[0], 3.0), route("r1", urls[1], 1.0))
        limits = Limits(in_flight=4)
        desks, clients = [], []
        for _ in range(2):
            app = make_app(tmp_path, limits, clock=lambda: now[0])
            desks.append(app.state.desk)
            base = stack.enter_context(served(app))
            headers = {"Authorization": f"Bearer {secret}"}
            client = httpx.Client(base_url=base, headers=headers, timeout=20)
            clients.append(stack.enter_context(client))
        assert wait_for(lambda: all(d.door.gateways == 2 and d.table.models for d in desks))
        balanced = cycle(clients)  # a balancer that knows nothing but turns
        answers = [ask(next(balanced), stream=n % 2 == 0).status_code for n in range(48)]
        # 20 of the 40 a minute at each; hardly any grow again while this runs.
        assert answers[:40] == [200] * 40
        assert set(answers[42:]) == {429}
        assert [len(engine.seen) for engine in engines] == [30, 10]  # weights hold over both
        for client, desk in zip(clients, desks, strict=True):
            targets = desk.table.targets["org/m", Phase.AGGREGATED]
            for target in targets:
                target.in_flight += 2  # half an engine's room each: together it is full
            desk.door._uses.clear()
            assert ask(client).json()["error"]["code"] == "engines_full"
            for target in targets:
                target.in_flight -= 2
        now[0] += 60.0
    frames = {
        kind: pl.read_parquet(tmp_path / "inbox" / f"{kind}-*.parquet")
        for kind in ("demand", "replicas")
    }
    assert frames["demand"]["gateway"].n_unique() == 2
    answered = sum(code == 200 for code in answers)
    assert frames["demand"]["measured"].sum() == answered
    assert frames["replicas"]["measured"].sum() == answered
    assert set(frames["replicas"]["template"]) == {"template of r0", "template of r1"}


def test_a_key_has_its_part_at_each_of_several_gateways(tmp_path: Path) -> None:
    now = [0.0]
    _, secret = add_key(tmp_path / "keys.json", "one", per_minute=6)
    door = Door(tmp_path / "keys.json", lambda: now[0])
    door.gateways = 3
    passed = 0
    for _ in range(60):  # a minute
        now[0] += 1.0
        try:
            with door.entered(f"Bearer {secret}"):
                passed += 1
        except Exception:
            continue
    assert passed in {3, 4}  # two at once, and two more that grow in the minute


def test_a_gateway_that_leaves_says_so_first_and_drops_nothing(tmp_path: Path) -> None:
    engine = Engine("endless")
    with ExitStack() as stack:
        url = stack.enter_context(served(engine.app()))
        file = HomeFiles(tmp_path).routes
        write_routes(file, Routes(models=("org/m",), routes=(route("r1", url),)))
        command = [
            sys.executable, "-m", "coral", "gateway", "--home", str(tmp_path), "--port", "0",
        ]  # fmt: skip
        port = free_port()
        command[-1] = str(port)
        process = subprocess.Popen([*command, "--notice", "1.5", "--drain", "20"])
        stack.callback(process.wait)
        stack.callback(process.kill)
        base = f"http://127.0.0.1:{port}"
        assert wait_for(lambda: answers(f"{base}/ready") == 200, 20.0)
        client = stack.enter_context(httpx.Client(base_url=base, timeout=20))
        body = {"model": "org/m", "prompt": "x", "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as streamed:
            lines = streamed.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert wait_for(lambda: answers(f"{base}/ready") == 503)
            engine.temper = ""
            fresh = httpx.post(f"{base}/v1/completions", json={**body, "stream": False})
            assert fresh.status_code == 200  # a balancer has not seen it yet
            assert wait_for(lambda: answers(f"{base}/health") is None)
            rest = list(lines)
            assert rest[-2] == "data: [DONE]"  # 300 events of 20 ms: it ends long after
        assert process.wait(10) in {0, -signal.SIGTERM}


def answers(url: str) -> int | None:
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.TransportError:
        return None

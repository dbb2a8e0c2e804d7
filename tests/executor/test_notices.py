"""What the cloud says of a node's end: from its metadata to the routes and the next round."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from executor.control.controller import Controller
from executor.control.keys import new_keys
from executor.control.messages import WireError, decode_notice
from executor.control.notices import REBALANCE, SPOT, MetadataWatch, Notice, look
from executor.notices_file import NodeNotice, Notices, read_notices, write_notices
from tests.executor.test_control import Here, until

AT = datetime(2026, 11, 30, 12, 2, tzinfo=UTC)
TOKEN = "a-token"


class Metadata:
    """An instance's metadata: IMDSv2, with what the test puts there."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        outer = self

        class Answers(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                right = self.path == "/latest/api/token"
                asked = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
                self._answer(200 if right and asked else 400, TOKEN)

            def do_GET(self) -> None:
                if self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
                    self._answer(401, "")
                    return
                text = outer.places.get(self.path.removeprefix("/latest/meta-data/"))
                self._answer(404 if text is None else 200, text or "")

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    found = Metadata()
    yield found
    found.server.shutdown()
    found.server.server_close()


def wait(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not condition():
        time.sleep(0.02)
    return condition()


def test_the_metadata_is_asked_as_imds_version_2_wants(metadata: Metadata) -> None:
    with httpx.Client(trust_env=False) as client:
        assert look(client, metadata.url) is None
        metadata.places["events/recommendations/rebalance"] = json.dumps(
            {"noticeTime": "2026-11-30T12:02:00Z"}
        )
        assert look(client, metadata.url) == Notice(REBALANCE, AT)
        metadata.places["spot/instance-action"] = json.dumps(
            {"action": "terminate", "time": "2026-11-30T12:02:00Z"}
        )
        assert look(client, metadata.url) == Notice(SPOT, AT)  # the graver one


def test_metadata_that_is_not_there_or_wrong_stops_nothing(metadata: Metadata) -> None:
    metadata.places["spot/instance-action"] = "soon"
    watch = MetadataWatch(metadata.url, poll_s=0.02)
    watch.start()
    time.sleep(0.2)
    assert watch.latest is None
    metadata.places["spot/instance-action"] = json.dumps({"time": "2026-11-30T12:02:00Z"})
    assert wait(lambda: watch.latest == Notice(SPOT, AT))
    watch.stop()


def test_an_agents_notice_reaches_the_controller(
    metadata: Metadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.control.notices.POLL_S", 0.05)
    monkeypatch.setattr(MetadataWatch.__init__, "__defaults__", (metadata.url, 0.05))
    controller, keys = Controller(new_keys(), lease_s=5.0), new_keys()
    controller.want_leases({"a": keys.public})
    agent = Here(controller, "a", keys, tmp_path, metadata=metadata.url)
    try:
        assert until(controller, lambda: controller.is_present("a"))
        assert controller.notice_of("a") is None
        metadata.places["spot/instance-action"] = json.dumps({"time": "2026-11-30T12:02:00Z"})
        assert until(controller, lambda: controller.notice_of("a") == Notice(SPOT, AT))
    finally:
        agent.end()
        controller.close()


@pytest.mark.parametrize(
    "value",
    [
        1,
        {},
        {"kind": "x", "at": AT.isoformat()},
        {"kind": SPOT},
        {"kind": SPOT, "at": "2026-11-30T12:02:00"},  # of which zone?
    ],
)
def test_a_notice_that_is_not_one_is_refused(value: object) -> None:
    with pytest.raises(WireError, match="a notice that is not one"):
        decode_notice(value)


def test_notices_are_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "notices.json"
    assert read_notices(path) == Notices()
    found = Notices(nodes={"a": NodeNotice(kind="spot", at=AT)})
    write_notices(path, found)
    assert read_notices(path) == found
    path.write_text("{")
    assert read_notices(path) == Notices()

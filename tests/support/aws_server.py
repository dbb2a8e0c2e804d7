"""AWS on this machine: moto's HTTP server, with what it lacks and with faults on demand.

moto 5.2 has real instance types, offerings, zones, instances and tags. Added here: spot prices and
on-demand prices of the shipped snapshot (paged, per zone id), placement scores, quotas, regions
that are off, limited capacity and client tokens of launches, and faults: throttling, expired
credentials, denied actions, slow or hanging answers.

    with AwsServer() as server, server.environment():
        boto3.client("ec2", region_name="us-east-1").describe_spot_price_history()
"""

from __future__ import annotations

import io
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl

from tests.support.aws_answers import ANSWERS, ec2_error, json_error
from tests.support.aws_data import Snapshot, shipped_snapshot

SCOPE = re.compile(r"Credential=[^/]+/\d+/([^/]+)/([^/]+)/aws4_request")
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_SESSION_TOKEN": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


@dataclass
class Fault:
    """What goes wrong with the calls that match; `times` of them, or all."""

    action: str = "*"  # shell patterns
    region: str = "*"
    code: str = ""  # of the error; none: the answer only comes late
    message: str = "injected"
    status: int = 400
    delay_s: float = 0.0
    times: int | None = None
    body: bytes | None = None  # in place of the answer

    def matches(self, call: Call) -> bool:
        return (
            self.times != 0
            and fnmatchcase(call.action, self.action)
            and fnmatchcase(call.region, self.region)
        )


@dataclass(frozen=True)
class Call:
    """One request as it came."""

    service: str  # as it is signed: 'ec2', 'servicequotas', 'pricing'
    region: str
    action: str
    parameters: Mapping[str, Any]


@dataclass
class AwsServer:
    """The server and its knobs; change them at any time."""

    page_size: int = 100
    enabled: set[str] = field(default_factory=lambda: set(shipped_snapshot().regions))
    scores: dict[str, int] = field(default_factory=dict)  # by region; 7 elsewhere
    quotas: dict[tuple[str, str], float] = field(default_factory=dict)  # (region, code); 512
    capacity: dict[tuple[str, str], int] = field(default_factory=dict)  # (type, zone name)
    clock: timedelta = timedelta(0)  # how far it is ahead of this machine's
    faults: list[Fault] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    data: Snapshot = field(default_factory=lambda: shipped_snapshot().copy())
    launched: dict[str, tuple[tuple[Any, ...], bytes]] = field(default_factory=dict)  # by token
    in_flight: int = 0
    most_in_flight: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> AwsServer:
        from werkzeug.serving import WSGIRequestHandler, make_server

        server = self

        class Handler(WSGIRequestHandler):
            """Quiet, and with the server's clock in its answers."""

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None: ...

            def date_time_string(self, timestamp: float | None = None) -> str:
                return format_datetime(datetime.now(UTC) + server.clock, usegmt=True)

        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # calls that hang end
        self._server.shutdown()
        self._thread.join(timeout=10)
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def variables(self) -> dict[str, str]:
        """Environment with which any AWS client talks to this server and to nothing else."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url}

    @contextmanager
    def environment(self) -> Iterator[None]:
        """The same for this process, inside the block."""
        before = {name: os.environ.get(name) for name in (*self.variables(), "AWS_PROFILE")}
        os.environ.pop("AWS_PROFILE", None)
        os.environ.update(self.variables())
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value

    def fail(self, action: str, code: str = "", **more: Any) -> Fault:
        """From now on calls of an action fail with a code, or are late (`delay_s`)."""
        fault = Fault(action=action, code=code, **more)
        self.faults.append(fault)
        return fault

    def actions(self) -> Counter[str]:
        """Calls so far, as an IAM policy names them: 'ec2:DescribeRegions'."""
        return Counter(f"{call.service}:{call.action}" for call in self.calls)

    def move_spot(self, instance_type: str, factor: float, at: datetime | None = None) -> None:
        """A new spot price of a type in all its zones."""
        self.data.move_spot(instance_type, factor, at or datetime.now(UTC) - timedelta(seconds=1))

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        call = _call_of(environ, body)
        with self._lock:
            self.calls.append(call)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return self._answer(call, environ, start_response)
        finally:
            with self._lock:
                self.in_flight -= 1

    def _answer(
        self, call: Call, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Any:
        fault = self._fault(call)
        if fault is not None:
            self._stop.wait(fault.delay_s)
            if fault.body is not None:
                return _send(start_response, fault.status, fault.body)
            if fault.code:
                return _send(start_response, fault.status, error_of(call, fault))
        if call.service == "ec2" and call.region not in self.enabled:
            off = Fault(code="AuthFailure", message="not able to validate the credentials")
            return _send(start_response, 401, error_of(call, off))
        handler = ANSWERS.get(call.action)
        if handler is not None:
            found = handler(self, call)
            if found is not None:
                return _send(start_response, *found)
        if call.action == "RunInstances":
            return self._launch(call, environ, start_response)
        return self._moto(environ, start_response)

    def _fault(self, call: Call) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.matches(call):
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None

    def _launch(
        self, call: Call, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Any:
        """Capacity by (type, zone), and one launch per client token, as EC2 has them."""
        asked = call.parameters
        token = str(asked.get("ClientToken", ""))
        same = tuple(sorted((k, v) for k, v in asked.items() if k != "ClientToken"))
        with self._lock:
            if token and token in self.launched:
                before, answer = self.launched[token]
                if before != same:
                    return _send(start_response, 400, ec2_error(
                        "IdempotentParameterMismatch", "the token was used for another request"
                    ))  # fmt: skip
                return _send(start_response, 200, answer)
            place = (str(asked.get("InstanceType")), str(asked.get("Placement.AvailabilityZone")))
            count = int(asked.get("MinCount", 1))
            left = self.capacity.get(place, count)
            if left < count:
                return _send(start_response, 500, ec2_error(
                    "InsufficientInstanceCapacity",
                    f"no {place[0]} capacity in {place[1]}",
                ))  # fmt: skip
            if place in self.capacity:
                self.capacity[place] = left - count
        status: list[Any] = []
        answer = b"".join(self._moto(environ, lambda *found: status.extend(found)))
        if token and str(status[0]).startswith("200"):
            with self._lock:
                self.launched[token] = (same, answer)
        start_response(*status)
        return [answer]

    @cached_property
    def _moto(self) -> Callable[..., Any]:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        return DomainDispatcherApplication(create_backend_app)


def error_of(call: Call, fault: Fault) -> bytes:
    """As the service of a call says it."""
    of_service = ec2_error if call.service == "ec2" else json_error
    return of_service(fault.code, fault.message)


def _call_of(environ: Mapping[str, Any], body: bytes) -> Call:
    found = SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
    region, service = found.groups() if found else ("", "unsigned")
    target = environ.get("HTTP_X_AMZ_TARGET")
    if target:
        return Call(service, region, target.rpartition(".")[2], json.loads(body or b"{}"))
    if service == "s3":  # bodies are objects
        return Call(service, region, f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}", {})
    parameters = dict(parse_qsl(body.decode(), keep_blank_values=True))
    return Call(service, region, parameters.get("Action", "?"), parameters)


def _send(start_response: Callable[..., Any], status: int, body: bytes) -> list[bytes]:
    kind = "application/x-amz-json-1.1" if body[:1] in (b"{", b"[") else "text/xml"
    headers = [("Content-Type", kind), ("Content-Length", str(len(body)))]
    start_response(f"{status} {'OK' if status == 200 else 'Error'}", headers)
    return [body]


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Until something is true."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it never came true")
        time.sleep(0.02)

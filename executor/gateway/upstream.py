"""What engines are asked and answer.

Bytes of a stream are passed on as they come; each event is looked at once, for what ends or counts.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

import aiohttp

from executor.gateway.errors import RequestError, malformed

CONNECT_S = 2.0
READ_S = 300.0  # between two chunks of a stream
WHOLE = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
STREAM = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S)
KEPT_S = 3.0  # idle connections: less than the 5 s after which an engine's uvicorn closes them
LONGEST_LINE_BYTES = 8 * 2**20
DATA, DONE = b"data:", b"data: [DONE]"
LAST = DONE + b"\n\n"

Event = tuple[bytes, Mapping[str, Any]]  # what is passed on, and what it holds


class EngineFailedError(Exception):
    """An engine did not give what was asked for."""


class Upstream:
    """Connections to engines; in an `async with` block."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Upstream:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer; it may take as long as it takes.

        Raises EngineFailedError: it broke off, aborted, or sent what is no answer. RequestError:
        the engine refuses the request.
        """
        try:
            async with self._post(url, body, WHOLE) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailedError(str(error)) from error
        _refuse_errors(response.status, content)
        return _checked(_object(content))

    async def events(self, url: str, body: Mapping[str, Any]) -> AsyncGenerator[Sequence[Event]]:
        """Events of a stream up to `[DONE]`, those together that came together.

        Raises as `post`, after all that came before.
        """
        found: list[Event] = []
        try:
            async with self._post(url, body, STREAM) as response:
                if response.status != 200:
                    _refuse_errors(response.status, await response.read())
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
                    if len(rest) > LONGEST_LINE_BYTES:
                        raise EngineFailedError("a line without an end")
                    for line in lines:
                        if line.startswith(DONE):
                            yield [*found, (LAST, {})]
                            return
                        if line.startswith(DATA):
                            found.append(_event(line.rstrip(b"\r")))
                    if found:
                        yield found
                        found = []
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailedError(str(error)) from error
        except EngineFailedError:
            if found:
                yield found
            raise
        raise EngineFailedError("the stream ended before it was done")

    def _post(
        self, url: str, body: Mapping[str, Any], timeout: aiohttp.ClientTimeout
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            raise EngineFailedError("the gateway is not up")
        return self._session.post(
            url, data=_encoded(body), headers=_headers(), allow_redirects=False, timeout=timeout
        )


def _headers() -> dict[str, str]:
    return {
        "X-Request-Id": uuid.uuid4().hex,
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",  # events are passed on as they come
    }


def _encoded(body: Mapping[str, Any]) -> bytes:
    """The body as bytes.

    Raises RequestError: numbers or text that JSON has no form for.
    """
    try:
        return json.dumps(body, allow_nan=False).encode()
    except ValueError as error:
        raise malformed(f"The request can't be passed on: {error}.") from error


def _refuse_errors(status: int, content: bytes) -> None:
    """What the engine refuses is the client's mistake; all else is the engine's failure."""
    if status == 200:
        return
    if status in {400, 413, 422}:
        text = content.decode(errors="replace")
        try:
            error = json.loads(text).get("error", {})
            message = str(error.get("message", text))
        except (ValueError, AttributeError):
            message = text
        raise RequestError(400, message, "invalid_request_error")
    raise EngineFailedError(f"status {status}")


def _event(line: bytes) -> Event:
    return line + b"\n\n", _checked(_object(line[len(DATA) :]))


def _object(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise EngineFailedError("not JSON") from error
    if not isinstance(found, dict):
        raise EngineFailedError("not an object")
    return found


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer or event that is no failure in disguise."""
    if "error" in answer:
        raise EngineFailedError(str(answer["error"]))
    choices = answer.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if isinstance(choice, dict) and choice.get("finish_reason") == "abort":
            raise EngineFailedError("aborted")
    return answer

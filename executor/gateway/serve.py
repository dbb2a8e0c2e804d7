"""One request from its engine, or from a prefill and a decode engine, to the client.

A failure before the first token is tried again elsewhere, and never after it. An answer whose
finish reason is `abort` is a failure: an engine that is stopped answers so, with status 200.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import httpx

from executor.gateway.errors import RequestError, busy, failed, malformed, not_ready
from executor.gateway.measure import Visit
from executor.gateway.table import RouteTable, Target, taken
from planner.types import Phase

MOST_TRIES = 3
WHOLE_ANSWER = httpx.Timeout(None, connect=2.0)
DATA, DONE = b"data:", b"data: [DONE]"
EMBEDDINGS = "/v1/embeddings"  # no tokens come out: nothing for a pair to do


class EngineFailedError(Exception):
    """An engine did not give what was asked for."""


class Server:
    """Sends requests on and passes answers back."""

    def __init__(self, table: RouteTable, client: httpx.AsyncClient) -> None:
        self.table, self.client = table, client

    async def answer(self, path: str, body: Mapping[str, Any], visit: Visit) -> dict[str, Any]:
        """The whole answer of a request without streaming.

        Raises RequestError: no replica is ready or has room, all tries failed, or the engine
        refuses the request.
        """
        model, tried = str(body["model"]), set[str]()
        for _ in range(MOST_TRIES):
            target, sent = await self._prepared(path, body, tried)
            try:
                with taken(target):
                    found = _checked(await self._post(target, path, sent))
                visit.used(found.get("usage"))
                return found
            except EngineFailedError:
                self.table.rest(target)
                tried.add(target.url)
        raise failed(model)

    async def stream(
        self, path: str, body: Mapping[str, Any], visit: Visit
    ) -> AsyncGenerator[bytes]:
        """Lines of server-sent events; the first one comes only when the engine has begun.

        Raises RequestError as `answer`, before the first line. Afterwards a failure is an error
        event, and the stream ends without `[DONE]`. Engines are asked for the usage; a client that
        did not ask for it does not see it.
        """
        model, tried = str(body["model"]), set[str]()
        body, hidden = _with_usage(body)
        for _ in range(MOST_TRIES):
            target, sent = await self._prepared(path, body, tried)
            begun = False
            try:
                with taken(target):
                    async for line, event in self._lines(target, path, sent):
                        if "usage" in event:
                            visit.used(event["usage"])
                        if event.get("choices"):
                            visit.event()
                        elif hidden and event.get("usage"):
                            continue
                        if line.startswith(DONE):  # its client may go before the engine has ended
                            visit.end(httpx.codes.OK)
                        begun = True
                        yield line
                    return
            except EngineFailedError:
                self.table.rest(target)
                if begun:
                    visit.end(httpx.codes.BAD_GATEWAY)
                    yield failed(model).event()
                    return
                tried.add(target.url)
        raise failed(model)

    async def _prepared(
        self, path: str, body: Mapping[str, Any], tried: set[str]
    ) -> tuple[Target, Mapping[str, Any]]:
        """The engine that answers, and what it is sent: of a pair, after its prefill."""
        model = str(body["model"])
        alone = self.table.pick(model, Phase.AGGREGATED, tried)
        pair = None if path == EMBEDDINGS else self.table.pick_decode(model, tried)
        while pair is not None and (alone is None or pair.load() < alone.load()):
            ready = await self._prefilled(path, body, pair, tried)
            if ready is not None:
                return pair, ready
            pair = self.table.pick_decode(model, tried)  # of a domain with another prefill
        if alone is not None:
            return alone, body
        if tried:
            raise failed(model)
        raise busy(model) if self.table.is_full(model) else not_ready(model)

    async def _prefilled(
        self, path: str, body: Mapping[str, Any], decode: Target, tried: set[str]
    ) -> Mapping[str, Any] | None:
        """The request for the decode engine once a prefill engine holds its KV; None: none did."""
        left_out = {"stream_options", "min_tokens"}
        prompt = {key: value for key, value in body.items() if key not in left_out}
        prompt |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in prompt:
            prompt["max_completion_tokens"] = 1
        prompt["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        model = str(body["model"])
        near = {decode.domain}  # KV goes from there alone
        while (target := self.table.pick(model, Phase.PREFILL, tried, near)) is not None:
            try:
                with taken(target):
                    found = _checked(await self._post(target, path, prompt))
            except EngineFailedError:
                self.table.rest(target)
                tried.add(target.url)
                continue
            transfer = found.get("kv_transfer_params")
            return {**body, "kv_transfer_params": transfer} if transfer else body
        return None

    async def _post(self, target: Target, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:  # a whole answer has no chunks in between: it may take as long as it takes
            response = await self.client.post(
                target.url + path, content=_encoded(body), headers=_headers(), timeout=WHOLE_ANSWER
            )
        except httpx.HTTPError as error:
            raise EngineFailedError(str(error)) from error
        _refuse_errors(response.status_code, response.text)
        try:
            found = response.json()
        except ValueError as error:
            raise EngineFailedError("not JSON") from error
        if not isinstance(found, dict):
            raise EngineFailedError("not an object")
        return found

    async def _lines(
        self, target: Target, path: str, body: Mapping[str, Any]
    ) -> AsyncIterator[tuple[bytes, Mapping[str, Any]]]:
        """Lines of one engine up to `[DONE]`, each with the event in it.

        Raises EngineFailedError: it broke off, aborted, or sent what is no event.
        """
        request = self.client.stream(
            "POST", target.url + path, content=_encoded(body), headers=_headers()
        )
        try:
            async with request as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    _refuse_errors(response.status_code, text)
                async for line in _split(response):
                    if not line.startswith(DATA):
                        continue
                    if line == DONE:
                        yield DONE + b"\n\n", {}
                        return
                    yield line + b"\n\n", _checked(_event(line))
        except httpx.HTTPError as error:
            raise EngineFailedError(str(error)) from error
        raise EngineFailedError("the stream ended before it was done")


def _with_usage(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """The body that asks for the usage at the end of a stream; whether the client did not."""
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or options.get("include_usage"):
        return body, False  # what is no object the engine refuses
    return {**body, "stream_options": {**options, "include_usage": True}}, True


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


def _refuse_errors(status: int, text: str) -> None:
    """What the engine refuses is the client's mistake; all else is the engine's failure."""
    if status == httpx.codes.OK:
        return
    if status in {400, 413, 422}:
        try:
            error = json.loads(text).get("error", {})
            message = str(error.get("message", text))
        except (ValueError, AttributeError):
            message = text
        raise RequestError(400, message, "invalid_request_error")
    raise EngineFailedError(f"status {status}")


async def _split(response: httpx.Response) -> AsyncIterator[bytes]:
    """Its lines as bytes, without their ends: they are passed on as they are."""
    rest = b""
    async for chunk in response.aiter_raw():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")


def _event(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line.removeprefix(DATA))
    except ValueError as error:
        raise EngineFailedError("an event that is not JSON") from error
    if not isinstance(found, dict):
        raise EngineFailedError("an event that is not an object")
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

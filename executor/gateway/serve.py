"""One request from its engine, or from a prefill and a decode engine, to the client.

A failure before the first token is tried again elsewhere, and never after it. An answer whose
finish reason is `abort` is a failure: an engine that is stopped answers so, with status 200.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from executor.gateway.errors import busy, failed, not_ready
from executor.gateway.measure import Visit
from executor.gateway.table import RouteTable, Target
from executor.gateway.upstream import LAST, EngineFailedError, Upstream
from planner.types import Phase

MOST_TRIES = 3
EMBEDDINGS = "/v1/embeddings"  # no tokens come out: nothing for a pair to do


class Server:
    """Sends requests on and passes answers back."""

    def __init__(self, table: RouteTable, upstream: Upstream) -> None:
        self.table, self.upstream = table, upstream

    async def answer(self, path: str, body: Mapping[str, Any], visit: Visit) -> dict[str, Any]:
        """The whole answer of a request without streaming.

        Raises RequestError: no replica is ready or has room, all tries failed, or the engine
        refuses the request.
        """
        model, tried = str(body["model"]), set[str]()
        for _ in range(MOST_TRIES):
            target, sent = await self._prepared(path, body, tried)
            try:
                with self.table.taken(target) as use:
                    found = await self.upstream.post(target.url + path, sent)
                    use.told(found.get("usage"))
                visit.used(found.get("usage"))
                return found
            except EngineFailedError:
                self.table.rest(target)
                tried.add(target.url)
        raise failed(model)

    async def stream(
        self, path: str, body: Mapping[str, Any], visit: Visit
    ) -> AsyncGenerator[bytes]:
        """Server-sent events; the first comes only when the engine has begun.

        Raises RequestError as `answer`, before the first event. Afterwards a failure is an error
        event, and the stream ends without `[DONE]`. Engines are asked for the usage; a client that
        did not ask for it does not see it.
        """
        model, tried = str(body["model"]), set[str]()
        body, hidden = _with_usage(body)
        for _ in range(MOST_TRIES):
            target, sent = await self._prepared(path, body, tried)
            begun = False
            try:
                async with aclosing(self._events(target, path, sent, visit, hidden)) as events:
                    async for passed in events:
                        begun = True
                        yield passed
                    return
            except EngineFailedError:
                self.table.rest(target)
                if begun:
                    visit.end(502)
                    yield failed(model).event()
                    return
                tried.add(target.url)
        raise failed(model)

    async def _events(
        self, target: Target, path: str, sent: Mapping[str, Any], visit: Visit, hidden: bool
    ) -> AsyncGenerator[bytes]:
        """Those of one engine, counted; without the usage where that is hidden.

        Raises EngineFailedError: it broke off.
        """
        batches = self.upstream.events(target.url + path, sent)
        with self.table.taken(target, stream=True) as use:
            async with aclosing(batches):
                async for batch in batches:
                    passed = b""
                    for line, event in batch:
                        usage = event.get("usage")
                        if usage:
                            visit.used(usage)
                            use.told(usage)
                        if event.get("choices"):
                            visit.event()
                            use.event()
                        elif hidden and usage:
                            continue
                        elif line is LAST:  # its client may go before the engine has ended
                            visit.end(200)
                        passed += line
                    if passed:
                        yield passed

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
                with self.table.taken(target) as use:
                    found = await self.upstream.post(target.url + path, prompt)
                    use.told(found.get("usage"))
            except EngineFailedError:
                self.table.rest(target)
                tried.add(target.url)
                continue
            transfer = found.get("kv_transfer_params")
            return {**body, "kv_transfer_params": transfer} if transfer else body
        return None


def _with_usage(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """The body that asks for the usage at the end of a stream; whether the client did not."""
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or options.get("include_usage"):
        return body, False  # what is no object the engine refuses
    return {**body, "stream_options": {**options, "include_usage": True}}, True

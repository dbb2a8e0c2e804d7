"""HTTP connections on which a request does not begin in time, or without end, are closed."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_S = 10.0  # for a request line and its headers
HEADERS_BYTES = 64 * 2**10


class PatientProtocol(HttpToolsProtocol):
    """As uvicorn's own, which waits for headers without end, and takes any number of them."""

    headers_s = HEADERS_S
    _impatient: asyncio.TimerHandle | None = None
    _in_headers = False
    _header_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._idle() and self._impatient is None:
            self._wait()  # the first bytes of a connection's next request
        super().data_received(data)
        if not self._idle():
            self._stop_waiting()
            return
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > HEADERS_BYTES:
                self._give_up()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _idle(self) -> bool:
        """No request is under way: its headers have not all come."""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        self._impatient = self.loop.call_later(self.headers_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._impatient is not None:
            self._impatient.cancel()
            self._impatient = None

    def _give_up(self) -> None:
        self._stop_waiting()
        if self._idle():
            self.transport.close()

"""A gateway as a process: its server, and how it leaves."""

from __future__ import annotations

import asyncio
import gc
import signal
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from executor.gateway.patience import PatientProtocol

GC_THRESHOLD = (50_000, 20, 20)  # objects of a request make hardly any cycles: look seldom


def serve(app: Starlette, notice_s: float, **options: Any) -> None:
    """Until it is told to end; uvicorn's options."""
    config = uvicorn.Config(
        app, http=PatientProtocol, loop="uvloop", ws="none", log_level="warning", **options
    )
    gc.collect()
    gc.freeze()  # modules are never garbage: to look through them again would hold up streams
    gc.set_threshold(*GC_THRESHOLD)
    LeavingServer(config, app, notice_s).run()


class LeavingServer(uvicorn.Server):
    """At SIGTERM it tells balancers first that it leaves, and serves on for a while."""

    def __init__(self, config: uvicorn.Config, app: Starlette, notice_s: float) -> None:
        super().__init__(config)
        self.desk, self.notice_s = app.state.desk, notice_s
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal ends the notice."""
        again, self.desk.is_leaving = self.desk.is_leaving, True
        leave = super().handle_exit
        if again or sig != signal.SIGTERM or not self.notice_s or self._loop is None:
            leave(sig, frame)
        else:
            later = self._loop.call_later
            self._loop.call_soon_threadsafe(later, self.notice_s, leave, sig, frame)

"""Routes as the controller pushes them (ZeroMQ, CURVE), and how many gateways share its limits.

`controller.json` and `keys/gateway.key` of the home say where it is and let this gateway in. While
it is heard the route file is not read; when it falls silent the file counts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from pydantic import ValidationError

from executor.control.keys import KeyFileError, KeyPair, read_keys
from executor.control.messages import WireError, decode, encode
from executor.gateway.door import Door
from executor.gateway.table import RouteTable
from executor.home import HomeFiles
from executor.routes import Routes

HELLO_EVERY_S = 1.0
SILENT_S = 4.0

log = logging.getLogger(__name__)


@dataclass
class Subscription:
    """One gateway's ear at its controller."""

    files: HomeFiles
    name: str  # of this gateway, among others
    table: RouteTable
    door: Door
    address: str | None = None  # None: as `controller.json` says
    is_heard: bool = False
    _has: str = ""  # the mark of the routes known
    _said: str = field(default="", repr=False)  # the last trouble that was logged

    async def run(self) -> None:
        """Until cancelled; a controller that is not there, or not let in, is tried again."""
        while True:
            try:
                address, server_key = self._controller()
                await self._listen(address, server_key, read_keys(self.files.gateway_key))
            except FileNotFoundError:
                pass  # no controller has been at work on this home
            except (OSError, ValueError, KeyError, TypeError, KeyFileError, zmq.ZMQError) as error:
                self._say(f"the controller can't be asked for routes ({error}); the file counts")
            await asyncio.sleep(HELLO_EVERY_S)

    async def _listen(self, address: str, server_key: str, keys: KeyPair) -> None:
        """Until it is silent for a while."""
        loop = asyncio.get_running_loop()
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.curve_serverkey = server_key.encode("ascii")
            socket.curve_publickey = keys.public.encode("ascii")
            socket.curve_secretkey = keys.secret.encode("ascii")
            socket.connect(address)
            heard_at = loop.time()
            while loop.time() - heard_at < SILENT_S:
                hello = encode("gateway", gateway=self.name, has=self._has)
                with contextlib.suppress(zmq.Again):  # it is not there, or does not let us in
                    await socket.send(hello, zmq.NOBLOCK)
                again_at = loop.time() + HELLO_EVERY_S
                while (left := again_at - loop.time()) > 0.0:
                    if await socket.poll(max(1, int(1000 * left))):
                        heard_at, before = loop.time(), self._has
                        self._take(await socket.recv())
                        if self._has != before:
                            break  # it waits to hear that these are known
        if self.is_heard:
            self._say("the controller is silent; the routes known stay, and the file counts")
        self.is_heard, self._has = False, ""  # the file may say otherwise meanwhile

    def _take(self, data: bytes) -> None:
        try:
            message = decode(data)
            routes = message.get("routes")
            if routes is not None:
                self.table.take(Routes.model_validate(routes))
                self._has = str(message.get("mark"))
            self.door.gateways = self.table.gateways = max(1, int(message.get("gateways", 1)))
        except (WireError, ValidationError, TypeError, ValueError) as error:
            self._say(f"the controller said what is no routes: {str(error).splitlines()[0]}")
            return
        self.is_heard, self._said = bool(self._has), ""

    def _controller(self) -> tuple[str, str]:
        """Its address and public key."""
        known = json.loads(self.files.controller.read_text())
        return self.address or str(known["address"]), str(known["public_key"])

    def _say(self, text: str) -> None:
        """Once."""
        if text != self._said:
            log.warning("%s", text)
            self._said = text

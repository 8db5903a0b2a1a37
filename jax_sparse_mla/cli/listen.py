"""The process's part: a socket, uvicorn around the application, and an end that lets requests finish."""

from __future__ import annotations

import logging
import socket
import time
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from jax_sparse_mla.server.app import Api

log = logging.getLogger(__name__)
LAST_SECONDS = 5  # for the last words to clients, once the time to finish is over


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to an address; raises OSError where that cannot be."""
    if port >= 1 << 16:  # of which the system would take the last 16 bits
        raise OSError(f"--port {port}: must be below {1 << 16}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise OSError(f"--host {host}: {error}") from error
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise OSError(f"--host {host} --port {port}: {error}") from error
    return made


class Server(uvicorn.Server):
    """Serves an Api. SIGTERM and Ctrl-C drain it: new requests are refused with 503, those that are open have so many
    seconds to finish, then they end with an error. A second signal ends them at once."""

    def __init__(self, api: Api, drain_seconds: float):
        # Waiting for the last connections is `drain`'s; uvicorn's own time begins when that is over.
        config = uvicorn.Config(
            api.app(), lifespan="on", log_config=None, access_log=False, timeout_graceful_shutdown=LAST_SECONDS
        )
        super().__init__(config)
        self._api, self._drain_seconds, self._until = api, drain_seconds, None
        self.signals = 0

    def drain(self) -> None:
        """Begins to end, at the next tick; from any thread, and from a signal, which may interrupt whoever holds a
        lock."""
        self.signals += 1

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.drain()

    async def on_tick(self, counter: int) -> bool:
        if self.signals and self._until is None:
            self._api.runner.refuse("the server is shutting down")
            self._until = time.monotonic() + self._drain_seconds
            log.warning("draining: %d requests are open", self._api.runner.open)
        if self._until is not None:
            over = self.signals > 1 or time.monotonic() >= self._until
            if over:
                await self._api.stop()
            if over or not (self._api.answering or self._api.runner.open):
                return True
        return await super().on_tick(counter)

"""Runs the app under uvicorn: SIGTERM lets running requests finish, and a second SIGINT ends the process at once."""

import asyncio
import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ling3.server import log
from ling3.server.connections import KEEP_ALIVE, Connection, Connections, room
from ling3.server.service import Service

INTERRUPTED = 130
LAST_LINES = 1.0
"""Seconds for writing the last lines of the log."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service, drain: float):
        super().__init__(config)
        self._service, self._drain = service, drain

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn's, but does not raise the signal again after the shutdown: the process exits with 0."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins the shutdown; SIGINT during it ends the process."""
        if self.should_exit and sig == signal.SIGINT:
            os._exit(INTERRUPTED)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections until requests have ended, so that /health tells load balancers; then closes."""
        self._service.draining = True
        if not await self._idle(self._drain):
            for task in self.server_state.tasks:
                task.cancel()
            await self._idle(1)
        await super().shutdown(sockets)

    async def _idle(self, seconds: float) -> bool:
        """Waits until no request is running. Returns False if one still is after `seconds`."""
        end = time.monotonic() + seconds
        while self.server_state.tasks and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return not self.server_state.tasks


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to a host and a port (0: a free one), not yet listening. Raises OSError if it cannot be bound."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise OSError(f"cannot listen on {host}, port {port}: {getattr(error, 'strerror', None) or error}") from None
    return bound


def run(app: ASGIApp, service: Service, bound: socket.socket, root_path: str, drain: float, timeout: float) -> None:
    """Serves on a bound socket until a signal; running requests then have `drain` seconds to finish.

    `timeout` limits, in seconds, how long clients may take to send a head and to read what was sent.
    """
    writer = log.configure()
    most, backlog = room()
    config = uvicorn.Config(
        app,
        http=functools.partial(Connection, Connections(most, timeout)),  # pyright: ignore[reportArgumentType]
        root_path=root_path,
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        backlog=backlog,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=1,
    )
    _Server(config, service, drain).run(sockets=[bound])
    writer.drain(LAST_LINES)

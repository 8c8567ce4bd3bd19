"""The app under uvicorn: SIGTERM lets running requests end, and a second SIGINT ends at once."""

# pyright: reportMissingImports=false
# What it takes is an extra, and types are checked without it too.

import contextlib
import signal
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but SIGTERM is not raised again after the shutdown, so that the process exits with 0."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run(app: ASGIApp, host: str, port: int, root_path: str, drain: int) -> None:
    """Serves until a signal; running requests then have `drain` seconds. OSError if it cannot listen there."""
    config = uvicorn.Config(
        app, host, port, root_path=root_path, log_level="warning", timeout_graceful_shutdown=drain, server_header=False
    )
    server = _Server(config)
    server.run(sockets=[config.bind_socket()])

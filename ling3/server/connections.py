"""Connections under uvicorn: limits on their number, and on the size and duration of incoming requests.

uvicorn with httptools accepts request heads of any size and waits for them without limit, and after a response it keeps
reading the rest of the request's body. All of this happens before an API key is checked.
"""

import asyncio
import dataclasses
import pathlib
import sys
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ling3.server import log
from ling3.server.errors import ApiError, Guarded, speaks_anthropics
from ling3.text.json_text import dumped

LONGEST_HEAD = 2**16
"""The most bytes of a request line and its headers."""
PER_BYTE = 8
"""Bytes of chunk framing and trailers that are allowed for each byte of a body."""
MOST_PIPELINED = 64
"""The most requests of one connection that wait for earlier ones to be answered."""
HEAD_SECONDS = 20.0
"""Seconds for a request's head to arrive, or for the rest of a body after its response."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than load balancers' usual 60, so that they close it first."""
LAST_WORDS = 1.0
"""Seconds that a client has to read why its connection is closed."""

MOST_CONNECTIONS, MOST_DESCRIPTORS = 2**13, 2**16
BACKLOG = 2**11
RESERVED = 32
"""Descriptors that are left for files, pipes and child processes."""
SPARE = 16
"""Connections that are accepted beyond the limit, for `GET` requests only, such as /health."""


@dataclasses.dataclass
class Connections:
    """The open connections, the oldest first, and their limits."""

    most: int
    """The most connections. One more closes the first by `Connection.rank`, unless all are being answered."""
    timeout: float
    """Seconds that a request may take, and that a client has to read what was sent to it."""
    open: dict["Connection", None] = dataclasses.field(default_factory=dict)

    @property
    def head_seconds(self) -> float:
        """Seconds for a request's head to arrive: `HEAD_SECONDS`, or `timeout` if that is less."""
        return min(HEAD_SECONDS, self.timeout)

    def add(self, new: "Connection") -> bool:
        """Adds a connection, closing another one if there are too many. Returns False if no other one can be closed."""
        self.open[new] = None
        if len(self.open) <= self.most:
            return True
        idle = [each for each in self.open if each.rank is not None and each is not new]
        if not idle:
            if len(self.open) > self.most + SPARE:
                new.transport.abort()
            return False
        oldest = min(idle, key=lambda each: each.rank or 0)
        del self.open[oldest]
        oldest.transport.abort()
        return True


def room() -> tuple[int, int]:
    """The most connections that the process's file descriptors allow, and the listen backlog.

    Raises the soft limit of descriptors to the hard one. Connections that arrive together are all accepted before the
    first is handled, so descriptors for a full backlog are set aside.
    """
    if sys.platform == "win32":
        return MOST_CONNECTIONS, BACKLOG
    import resource  # noqa: PLC0415 -- not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    in_use = len(list(pathlib.Path("/dev/fd").iterdir()))
    free = (most if soft == resource.RLIM_INFINITY else soft) - in_use - RESERVED - SPARE
    backlog = max(1, min(BACKLOG, free // 3))
    return max(1, min(MOST_CONNECTIONS, free - backlog)), backlog


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits on heads, bodies and the number of connections."""

    def __init__(self, connections: Connections, **settings: Any):
        super().__init__(**settings)
        self._connections = connections
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        # Bytes of the current request outside of its body, and in it.
        self._other = self._body = 0
        self._in_head = self._refused = False

    @property
    def rank(self) -> int | None:
        """The order of closing: 0 without a request, 1 idle after one, 2 amid a body; None (never) while answering."""
        if self.cycle is None or self.transport.is_closing() or (self._in_head and self.cycle.response_complete):
            return 0
        return 1 if self.cycle.response_complete else 2 if self.cycle.more_body else None

    def connection_made(self, transport: Any) -> None:  # uvloop's transport is not an `asyncio.Transport`
        """Adds the connection; beyond the limit it may only send GET requests."""
        super().connection_made(transport)
        if not self._connections.add(self):
            self.app = Guarded(self.app, _crowded)  # pyright: ignore[reportAttributeAccessIssue]
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Makes room for another connection when this one ends."""
        self._connections.open.pop(self, None)
        self._unwatch()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses data in parts of `LONGEST_HEAD` bytes, and refuses a head as soon as it is too long."""
        for start in range(0, len(data), LONGEST_HEAD):
            if self._refused or self.transport.is_closing():
                return
            part = data[start : start + LONGEST_HEAD]
            self._other += len(part)
            super().data_received(part)
            if self._other > LONGEST_HEAD + PER_BYTE * self._body:
                self._refuse(ApiError(431, f"the request's headers have more than {LONGEST_HEAD} bytes"))
        self._watch()

    def on_message_begin(self) -> None:
        """Resets the counts at the first byte of a request."""
        self._other, self._body, self._in_head = 0, 0, True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header; trailers, which come after the head, are dropped."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Starts to answer the request; closes the connection if too many are pipelined."""
        self._in_head = False
        self._unwatch()
        if len(self.pipeline) >= MOST_PIPELINED:
            self.transport.abort()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Counts and takes the next part of the request's body."""
        self._other -= len(body)
        self._body += len(body)
        super().on_body(body)

    def pause_writing(self) -> None:
        """Limits the time that the client takes to read what was sent."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._connections.timeout + LAST_WORDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancels the time limit that `pause_writing` has set."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, and aborts it later if the client reads nothing."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(KEEP_ALIVE, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuses data that is not valid HTTP."""
        self._refuse(ApiError(400, msg.removesuffix(".").lower()))

    def _watch(self) -> None:
        """Starts the time limit for the next request's head, unless a request is being answered."""
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._timer = self.loop.call_later(self._connections.head_seconds, self._late)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._in_head and not self._refused:
            seconds = self._connections.head_seconds
            self._refuse(ApiError(408, f"the request's headers took more than {seconds:g} seconds to come"))
        else:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Sends an error and closes the connection, or only closes it amid an answer. Later data is dropped."""
        self._refused = True
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            self.transport.abort()
            return
        log.logger.info("refused", extra={"fields": {"status": error.status}})
        anthropics = speaks_anthropics(getattr(self, "url", b"").partition(b"?")[0].decode("latin-1"))
        body = dumped(error.anthropic_body if anthropics else error.body).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LAST_WORDS, self.transport.abort)


def _crowded(scope: Scope) -> ApiError | None:
    """Refuses every method but GET, on connections beyond the limit."""
    if scope["method"] == "GET":
        return None
    headers = {"Retry-After": "1", "Connection": "close"}
    return ApiError(503, "the server has too many connections", None, "too_many_connections", headers)

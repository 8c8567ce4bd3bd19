"""Connections under uvicorn: bounds on their number, and on the size and time of what is not a request yet.

uvicorn over httptools takes heads of any size and waits for them without end, and once a request is answered it reads
on whatever its body still brings. All of that is before an API key was looked at.
"""

import asyncio
import dataclasses
import pathlib
import sys
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ling3.server import log
from ling3.server.errors import ApiError, Guarded
from ling3.text.json_text import dumped

LONGEST_HEAD = 2**16
"""Bytes of a request's line and headers."""
PER_BYTE = 8
"""Bytes of framing and trailers, for each of a body."""
MOST_PIPELINED = 64
"""Requests on one connection that wait for the answer before theirs."""
HEAD_SECONDS = 20.0
"""In which the head of a request has to come, and the rest of a body that nobody reads."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than balancers' usual 60, so that they close it."""
LAST_WORDS = 1.0
"""Seconds in which a client can read why its connection ends."""

MOST_CONNECTIONS, MOST_DESCRIPTORS = 2**13, 2**16
BACKLOG = 2**11
RESERVED = 32
"""Descriptors for files, pipes and child processes."""
SPARE = 16
"""Connections beyond the most that are taken for `GET`, as of /health."""


@dataclasses.dataclass
class Connections:
    """The connections that are open, the oldest first, and their bounds."""

    most: int
    """How many there may be; one more ends the oldest that has no request, if there is one."""
    timeout: float
    """Seconds that a request may take; a client has as many to take what was sent."""
    open: dict["Connection", None] = dataclasses.field(default_factory=dict)

    @property
    def head_seconds(self) -> float:
        """Seconds in which a request's head has to come."""
        return min(HEAD_SECONDS, self.timeout)

    def add(self, new: "Connection") -> bool:
        """Takes a connection; False where it is one of the spare ones."""
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
    """How many connections fit among the descriptors that this process may have, and the backlog for as many.

    Raises the soft limit to the hard one. Connections that arrive together are all accepted before the first is looked
    at, so there is room for a backlog besides.
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
    """uvicorn's protocol with bounds on heads, bodies and numbers."""

    def __init__(self, connections: Connections, **settings: Any):
        super().__init__(**settings)
        self._connections = connections
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        # Bytes of the message that are not of its body, and those that are.
        self._other = self._body = 0
        self._in_head = self._refused = False

    @property
    def rank(self) -> int | None:
        """The order in which connections end: without a request, idle, amid a body; None while one is answered."""
        if self.cycle is None or self.transport.is_closing() or (self._in_head and self.cycle.response_complete):
            return 0
        return 1 if self.cycle.response_complete else 2 if self.cycle.more_body else None

    def connection_made(self, transport: Any) -> None:  # uvloop's is no `asyncio.Transport`
        """Takes the connection if there is room."""
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
        """Parses what came, in parts, so that no head is parsed which is too long."""
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
        """Notes the first byte of a request."""
        self._other, self._body, self._in_head = 0, 0, True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers are left out."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begins to answer once the head is whole."""
        self._in_head = False
        self._unwatch()
        if len(self.pipeline) >= MOST_PIPELINED:
            self.transport.abort()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Takes the next part of the request's body."""
        self._other -= len(body)
        self._body += len(body)
        super().on_body(body)

    def pause_writing(self) -> None:
        """Limits the time until the client takes what was sent."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._connections.timeout + LAST_WORDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Ends the limit on the time that writing waits."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def timeout_keep_alive_handler(self) -> None:
        """Ends an idle connection, at last also one whose client reads nothing."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(KEEP_ALIVE, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Ends a connection on which there is no HTTP."""
        self._refuse(ApiError(400, msg.removesuffix(".").lower()))

    def _watch(self) -> None:
        """Limits the time until a request begins, where none is under way."""
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
        """Ends the connection with an error, unless an answer is under way; what comes meanwhile is dropped."""
        self._refused = True
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            self.transport.abort()
            return
        log.logger.info("refused", extra={"fields": {"status": error.status}})
        body = dumped(error.body).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LAST_WORDS, self.transport.abort)


def _crowded(scope: Scope) -> ApiError | None:
    """Refuses what may do more than look, on connections beyond the most."""
    if scope["method"] == "GET":
        return None
    headers = {"Retry-After": "1", "Connection": "close"}
    return ApiError(503, "the server has too many connections", None, "too_many_connections", headers)

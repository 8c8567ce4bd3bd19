"""The app's outermost layer: request ids, the access log, metrics, and the time limit of requests."""

import asyncio
import contextlib
import re
import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ling3.server import log
from ling3.server.errors import ApiError, in_anthropics_form
from ling3.server.limits import LARGE, MOST_LARGE
from ling3.server.service import Service

GIVEN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""The form of request ids that are accepted from clients."""
LONGEST_PATH = 200
LAST_WORDS = 1.0
"""Seconds that a client has to receive the error that ends its request."""
GONE = 499
"""The logged status of a request whose client did not wait for the end of the answer; it is never sent."""


class Observed:
    """Middleware that logs and counts requests. Those that exceed `timeout` seconds, or the drain, end in an error."""

    def __init__(self, app: ASGIApp, service: Service, timeout: float | None):
        self._app, self._service, self._timeout = app, service, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request, then logs and counts it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, exchange = time.perf_counter(), _Exchange(scope, receive, send, self._service)
        before = log.current.set(exchange.entry)
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            if not self._service.draining:
                raise
            await exchange.end(ApiError(503, "the server is shutting down", code="shutting_down"))
        except Exception:
            if limit.expired():
                await exchange.end(self._late(exchange))
            else:
                log.logger.exception("the server failed", extra={"fields": {"request_id": exchange.entry.request_id}})
                await exchange.end(ApiError(500, "the server failed"))
        finally:
            self._service.large_bytes -= exchange.large
            log.current.reset(before)
            self._note(scope, exchange, time.perf_counter() - begin)

    def _late(self, exchange: "_Exchange") -> ApiError:
        if exchange.asked:
            return ApiError(504, f"the answer took more than {self._timeout:g} seconds", code="timeout")
        message = f"the request took more than {self._timeout:g} seconds to come"
        return ApiError(408, message, code="timeout", headers={"Connection": "close"})

    def _note(self, scope: Scope, exchange: "_Exchange", seconds: float) -> None:
        status = exchange.status if exchange.complete else GONE
        route = getattr(scope.get("route"), "path", "") or "other"
        self._service.metrics.answered(route, status)
        entry, path = exchange.entry, scope["path"][:LONGEST_PATH]
        fields = {"request_id": entry.request_id, "method": scope["method"], "path": path, "status": status}
        fields |= {"seconds": round(seconds, 6)}
        if entry.prompt_tokens:
            fields |= {"prompt_tokens": entry.prompt_tokens, "completion_tokens": entry.completion_tokens}
        log.logger.info("answered", extra={"fields": fields})


class _Exchange:
    """One request and its response: how much of each has been transferred."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, service: Service):
        given = Headers(scope=scope).get("x-request-id", "")
        self.entry = log.Entry(given if GIVEN.fullmatch(given) else f"req_{uuid.uuid4().hex}")
        self.asked = self.complete = False
        self.status = self.large = 0
        self._service, self._came = service, 0
        self._scope, self._receive, self._send = scope, receive, send

    async def receive(self) -> Message:
        """The next message from the client. Raises ApiError 429 if large requests hold too much memory already."""
        message = await self._receive()
        self.asked = self.asked or not message.get("more_body", False)
        self._came += len(message.get("body", b""))
        more = max(0, self._came - LARGE) - self.large
        if self._service.large_bytes + more > MOST_LARGE:
            text = "the server has too many large requests: try again"
            raise ApiError(429, text, None, "too_many_large_requests", {"Retry-After": "1"})
        self.large += more
        self._service.large_bytes += more
        return message

    async def send(self, message: Message) -> None:
        """Sends a message to the client, with the request id among its headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            names = (b"x-request-id", b"request-id") if in_anthropics_form(self._scope) else (b"x-request-id",)
            headers = [*message["headers"], *((name, self.entry.request_id.encode()) for name in names)]
            message = {**message, "headers": headers}
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True

    async def end(self, error: ApiError) -> None:
        """Sends an error unless the response is complete: as the response, or as the last event of its stream."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                if not self.status:
                    await error.response(self._scope)(self._scope, self._receive, self.send)
                elif "answer" in self._scope and not self.complete:
                    last = self._scope["answer"].failed(error)
                    await self.send({"type": "http.response.body", "body": last.encode()})

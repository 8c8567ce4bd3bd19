"""Endpoints that read a body, whose work ends when their client goes away."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pydantic
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ling3.server import body
from ling3.server.service import Service


class Post:
    """An endpoint: `answer` makes a response of a body, a `model`, and is cancelled if the client goes away."""

    def __init__(self, model: type[pydantic.BaseModel], answer: Callable[[Service, Any], Awaitable[Response]]):
        self.model, self._answer = model, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        request = Request(scope, receive)
        service: Service = request.app.state.service
        asked: Any = await body.read(request, self.model)
        service.check_model(asked.model)

        async def answered() -> None:
            response = await self._answer(service, asked)
            await response(scope, receive, send)

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work, watch = asyncio.create_task(answered()), asyncio.create_task(gone())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for each in (work, watch):
                each.cancel()
